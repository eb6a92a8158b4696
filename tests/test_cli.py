"""The command line without a model: help, mistakes, verdicts."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from families import tiny_model
from lookfar.cli import app, main
from lookfar.cli.steps import StepPrinter, coloured
from lookfar.version import __version__
from test_lm import byte_tokenizer


@pytest.fixture(autouse=True)
def _warnings_as_before() -> Iterator[None]:
    """`main` sets how warnings are shown; the other tests want them as errors."""
    with warnings.catch_warnings():
        yield


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["lookfar", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def save(family: str, folder: Path) -> str:
    """Save a tiny model of a family with a tokenizer; returns the directory."""
    tokenizer = byte_tokenizer()
    tiny_model(family, torch.float32, vocab_size=len(tokenizer)).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return str(folder / "tiny")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return save("llama", tmp_path)


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert {command.callback.__name__ for command in app.registered_commands} == {"generate", "compare", "check"}
    assert all(name in shown for name in ("generate", "compare", "check"))


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"lookfar {__version__}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "Hi", "--strategy", "magic"], "Unknown strategy 'magic'"),
        (["generate", "Hi", "--set", "window"], "--set takes key=value"),
        (["generate", "Hi", "--set", "window=0"], "window must be a whole number of at least 1, not 0"),
        (["generate", "Hi", "--set", "ngram=1"], "ngram must be a whole number of at least 2, not 1"),
        (["generate", "Hi", "--set", "speed=9"], "Unknown setting 'speed'"),
        (["compare", "Hi", "--model", "./nowhere"], "./nowhere does not exist"),
        (["check", "./nowhere"], "./nowhere does not exist"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.err.startswith("Error: ")
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""


def test_mistakes_with_a_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    weights = Path(saved) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    for model, sentence in ((str(tmp_path / "empty"), "without a config.json"), (saved, "cannot be loaded")):
        assert run(monkeypatch, "generate", "Hi", "--model", model) == 2
        shown = capsys.readouterr().err
        assert sentence in shown
        assert "Traceback" not in shown


def test_a_whole_run_on_a_tiny_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run(monkeypatch, "generate", "-", "--raw", "--json", "--max-new-tokens", "5", "--model", saved) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stats"]["prompt_tokens"] == len("from a pipe")
    assert len(record["token_ids"]) == 5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba"}, ["none: plain decoding", "cannot be rolled back"]),
        ({"model_type": "gemma2"}, ["verified in one tree", "sliding window of 4096", "full attention"]),
        ({"model_type": "bloom"}, ["by ALiBi bias", "no limit"]),
        ({"model_type": "mpt"}, ["each sequence in a forward of its own"]),
    ],
)
def test_check_reads_a_config_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: dict[str, str],
    said: list[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in (tmp_path, tmp_path / "config.json"):
        assert run(monkeypatch, "check", str(where)) == 0
        shown = capsys.readouterr().out
        assert all(words in shown for words in said)


def test_a_character_split_over_steps_is_printed_whole() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("né €!").input_ids
    printer = StepPrinter(tokenizer)
    pieces = [printer.piece([token]).plain for token in ids]
    assert pieces == ["n", "", "é", " ", "", "", "€", "!"]
    assert coloured(tokenizer, ids, [3, 4, 1]).plain == "né €!"


def test_tokens_of_one_step_share_a_colour() -> None:
    tokenizer = byte_tokenizer()
    text = coloured(tokenizer, tokenizer("abcdef").input_ids, [1, 3, 2])
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(text, end="")
    assert [text.plain[span.start : span.end] for span in text.spans] == ["a", "bcd", "ef"]
    assert len({span.style for span in text.spans}) == 3


def test_compare_never_hides_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    """A strategy that breaks the promise is shown with the place and the margin of the first difference."""
    from lookfar import verify

    def wrong(tree: object, choose: object) -> verify.Walk:
        return verify.Walk([], [7])

    arguments = ("compare", "abc", "--raw", "--model", saved, "--max-new-tokens", "6", "--strategy", "jacobi")
    assert run(monkeypatch, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["first_difference"] is None
    plainly, steps = verify.walk, iter(range(1000))
    monkeypatch.setattr(verify, "walk", lambda *a: wrong(*a) if next(steps) > 12 else plainly(*a))
    assert run(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "Different from token" in shown
    assert "The two best logits there are" in shown


def test_a_model_that_decodes_plainly_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = save("mamba", tmp_path)
    capsys.readouterr()
    assert run(monkeypatch, "generate", "abc", "--model", model, "--max-new-tokens", "3") == 0
    shown = capsys.readouterr().err
    assert "Note: mamba decodes plainly, without guesses: its recurrent state" in shown
    assert "3 tokens in 3 steps" in shown


def test_a_fault_of_ours_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    from lookfar import engine

    def broken(*args: object) -> None:
        raise RuntimeError("out of cheese\nin line 7")

    capsys.readouterr()
    monkeypatch.setattr(engine, "plan_step", broken)
    monkeypatch.delenv("LOOKFAR_DEBUG", raising=False)
    assert run(monkeypatch, "generate", "abc", "--model", saved) == 1
    shown = capsys.readouterr().err
    assert "Error: RuntimeError: out of cheese (set LOOKFAR_DEBUG=1 to see where)" in shown
    assert "Traceback" not in shown
