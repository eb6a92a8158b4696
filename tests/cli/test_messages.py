"""Mistakes that newcomers make: each is one plain sentence that says what to do, before any waiting."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from families import tiny_model
from helpers import byte_tokenizer
from lookfar.cli import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    tokenizer = byte_tokenizer()
    tiny_model("llama", torch.float32, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in this process; returns its exit code and what it said on standard error."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lookfar", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), capsys.readouterr().err

    with warnings.catch_warnings():
        yield run


def one_sentence(said: str) -> str:
    """Return the message of an error, and check that it is one line with a full stop."""
    assert said.startswith("Error: ")
    assert len(said.strip().splitlines()) == 1
    assert said.strip().endswith(".")
    return said.removeprefix("Error: ").strip()


def with_config(model: Path, **changes: Any) -> Path:
    """Return a copy of a model with another config."""
    copy = model.with_name("other")
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


@pytest.mark.parametrize("command", [["generate", "Hi", "--model"], ["check"]])
def test_a_gguf_file(run: Run, tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    code, said = run(*command, file)
    assert code == 2
    assert "is a GGUF file" in (sentence := one_sentence(said))
    assert "give the directory or the hub name" in sentence


def test_weights_of_another_shape_than_the_config(run: Run, model: Path) -> None:
    code, said = run("generate", "Hi", "--raw", "--model", with_config(model, intermediate_size=64))
    assert code == 2
    sentence = one_sentence(said)
    assert "model.layers.0.mlp.down_proj.weight has the shape [32, " in sentence
    assert "64] by its config, so use the config.json that came with the weights" in sentence


def test_weights_that_the_checkpoint_lacks_are_a_note(run: Run, model: Path) -> None:
    code, said = run(
        "generate", "Hi", "--raw", "--max-new-tokens", "2", "--model", with_config(model, num_hidden_layers=3)
    )
    assert code == 0
    assert "Note: The checkpoint lacks weights" in said
    assert "transformers has made random ones" in said


def test_a_text_that_is_too_long(run: Run, model: Path) -> None:
    code, said = run("generate", "x" * 400, "--raw", "--model", model)
    assert code == 2
    assert "400 tokens" in (sentence := one_sentence(said))
    assert sentence.endswith("do not fit in 256, the most that this model has positions for: shorten the prompt.")
    code, said = run("generate", "x" * 200, "--raw", "--model", model)
    assert one_sentence(said).endswith("positions for: lower max_new_tokens or shorten the prompt.")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "objekt"}', "The JSON schema cannot be used (Invalid type: objekt): correct it."),
        ('{"type": ', "it is not JSON: Expecting value in line 1, column 10"),
        ("[1]", "schema must be an object or boolean"),
        (None, "cannot be read (No such file or directory): give --json-schema a file."),
    ],
)
def test_a_schema(run: Run, model: Path, tmp_path: Path, schema: str | None, reason: str) -> None:
    file = tmp_path / "schema.json"
    if schema is not None:
        file.write_text(schema)
    code, said = run("generate", "Hi", "--raw", "--model", model, "--json-schema", file)
    assert code == 2
    assert reason in one_sentence(said)


@pytest.mark.parametrize(
    ("regex", "reason"),
    [
        ("[a-", "The regular expression [a- cannot be used (unclosed character class): correct it."),
        ("(?=x)a", "look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
    ],
)
def test_a_regular_expression(run: Run, model: Path, regex: str, reason: str) -> None:
    code, said = run("generate", "Hi", "--raw", "--model", model, "--regex", regex)
    assert code == 2
    assert reason in one_sentence(said)


def test_a_benchmark_is_resumed_with_the_same_methods_only(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hello\n")
    bench = ["bench", "--prompts", tmp_path / "prompts.txt", "--model", model, "--max-new-tokens", "3"]
    out = ["--out", tmp_path / "bench.json"]
    assert run(*bench, *out, "--baselines", "none")[0] == 0
    assert run(*bench, *out, "--baselines", "none")[0] == 0
    code, said = run(*bench, *out, "--baselines", "generate")
    assert code == 2
    sentence = one_sentence(said)
    assert "was measured with other methods (none, auto, now hf generate, none, auto)" in sentence
    assert "give another file with --out" in sentence


def test_the_file_of_a_benchmark_is_checked_before_anything_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookfar.loading.load", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "prompts.txt").write_text("hello\n")
    (tmp_path / "locked").mkdir()
    bench = ["bench", "--prompts", tmp_path / "prompts.txt", "--model", "any"]
    for out, reason in (
        (tmp_path / "nowhere" / "b.json", "is not a directory: give --out a file in one that exists"),
        (tmp_path, "is a directory: give --out a file"),
        (tmp_path / "prompts.txt", "is not JSON, perhaps cut off: give another file"),
    ):
        code, said = run(*bench, "--out", out)
        assert code == 2
        assert reason in one_sentence(said)
    monkeypatch.setattr("os.access", lambda _, mode, **__: mode != os.W_OK)
    code, said = run(*bench, "--out", tmp_path / "locked" / "b.json")
    assert code == 2
    assert "cannot be written: give --out a file in a directory of yours" in one_sentence(said)
