"""Random command lines: each ends with exit code 0 or 2, soon, and without a traceback.

The options come from the commands themselves, so that new ones take part. The inputs are always the same ones;
`FUZZ_INPUTS=2500` tries as many others.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import lookfar
from families import tiny_model
from helpers import byte_tokenizer
from lookfar.cli import app, main

INPUTS = int(os.environ.get("FUZZ_INPUTS", "150"))
SECONDS = 60  # for one command line, on a busy machine

pytestmark = pytest.mark.slow

RIGHT = ["1", "2", "7", "0.5", "1"] * 3
WRONG = ["0", "-1", "1.5", "nan", "inf", "-inf", "1e308", "1e-320", "65537", str(10**30), "", "x", "٣"]
NUMBERS = st.sampled_from(RIGHT + WRONG)
STRATEGIES = [
    "auto",
    "none",
    "lookahead",
    "suffix+trie",
    "recycle",
    "jacobi",
    "prompt_lookup",
    "draft_model",
    "mtp",
    "x+",
    "+",
]
OTHER_WORDS = ["cpu", "cuda:7", "tpu", "float32", "float64", "bfloat16", "int8", "generate"]
SETTINGS = ["window=3", "ngram=1", "rows=", "=", "a=b=c"]
WORDS = st.sampled_from(STRATEGIES + OTHER_WORDS + SETTINGS)
TEXT = st.text(max_size=12).filter(lambda text: "\0" not in text)
PATTERNS = ["[a-z]+", "(", "a{1,9}", "(?=a)", "", "\\d{3}|\\w*", "[^"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Things that a path can lead to."""
    folder = tmp_path_factory.mktemp("places")
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", torch.float32, vocab_size=len(tokenizer))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lm = lookfar.LM(model, tokenizer)
    lm.store.learn(["one text", "another text"])
    lm.store.save(folder / "a.store")
    (folder / "garbage").write_bytes(bytes(range(256)) * 9)
    (folder / "empty").write_bytes(b"")
    prompts = [{"id": str(n), "task": "t", "format": "completion", "prompt": f"hello {n}"} for n in range(3)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "texts.txt").write_text("one line\nanother line\n")
    (folder / "schema.json").write_text('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    (folder / "nested.json").write_text("[" * 100_000)
    return {path.name: str(path) for path in folder.iterdir()} | {
        "missing": str(folder / "missing" / "file"),
        "new": str(folder / "new"),
        "folder": str(folder),
    }


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for module in ("engine.costs", "profiles"):
        monkeypatch.setattr(f"lookfar.{module}.cache_dir", lambda: tmp_path)
    monkeypatch.delenv("LOOKFAR_DEBUG", raising=False)
    with warnings.catch_warnings():
        yield


def commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(group, "commands") or group.invoke_without_command:
        yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*names, name))


ENDLESS = (("serve",), ("top",))  # they run until they are stopped, and have tests of their own
COMMANDS = [found for found in commands(typer.main.get_command(app)) if found[0] not in ENDLESS]


def values(name: str, kind: str, places: dict[str, str]) -> st.SearchStrategy[str]:
    """Values for an option or argument, most of them of the right kind."""
    paths = sorted(places.values())
    right = {
        "model": [places["model"]],
        "prompts": [places["prompts.jsonl"]],
        "strategy": STRATEGIES,
        "strategies": [*STRATEGIES, "none,suffix"],
        "settings": SETTINGS,
        "budget": ["auto", "1", "8"],
        "device": ["cpu"],
        "dtype": ["float32", "float64", "bfloat16"],
        "contexts": ["8", "4,16"],
        "rows": ["1", "1,4"],
        "batch": ["1", "1,2"],
        "max_new_tokens": ["1", "3", "8"],
        "regex": PATTERNS,
    }
    some = st.one_of(WORDS, TEXT, NUMBERS, st.sampled_from(paths))
    if "Path" in kind:
        some = st.sampled_from(paths)
    elif "int" in kind or "float" in kind:
        some = NUMBERS
    usual = st.sampled_from(right[name]) if name in right else some
    return st.integers(0, 7).flatmap(lambda chance: some if chance == 0 else usual)


@st.composite
def command_lines(draw: st.DrawFn, places: dict[str, str]) -> list[str]:
    names, command = draw(st.sampled_from(COMMANDS))
    line: list[str] = []
    kinds = {name: str(kind) for name, kind in get_type_hints(command.callback).items()}
    for parameter in command.params:
        always = parameter.required or parameter.name in ("model", "prompts", "max_new_tokens")
        if parameter.name == "help" or not (always or draw(st.integers(0, 9)) == 0):
            continue
        flag = parameter.param_type_name == "option" and parameter.is_flag
        given = [] if flag else [draw(values(parameter.name, kinds[parameter.name], places))]
        if parameter.param_type_name == "argument":
            line = [*given, *line]
        else:
            line += [parameter.opts[0], *given]
    if draw(st.integers(0, 19)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(st.one_of(TEXT, WORDS)))
    return [*names, *line]


@settings(
    max_examples=INPUTS,
    derandomize="FUZZ_INPUTS" not in os.environ,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_command_line_ends_with_an_answer_or_a_sentence(
    data: Any, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = data.draw(command_lines(places), "line")
    typed = data.draw(st.sampled_from(["", "hello\n", "/help\n/quit\n", "\udcff\n", "hello\nagain\n/undo\n"]))
    with TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.chdir(folder)  # some words name files that are written
        code, out, err = run(patch, line, typed)
    assert code in (0, 2), f"exit {code}: {out}\n{err}"
    assert "Traceback" not in out + err


def run(patch: pytest.MonkeyPatch, line: list[str], typed: str) -> tuple[int, str, str]:
    """Run a command line in this process; returns its exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    patch.setattr(sys, "argv", ["lookfar", *line])
    patch.setattr(sys, "stdin", io.StringIO(typed))
    patch.setattr(sys, "stdout", out)
    patch.setattr(sys, "stderr", err)
    signal.signal(signal.SIGALRM, took_too_long)
    signal.alarm(SECONDS)
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0), out.getvalue(), err.getvalue()
    finally:
        signal.alarm(0)
    return 0, out.getvalue(), err.getvalue()


def took_too_long(*_: Any) -> None:
    raise KeyboardInterrupt(f"it took more than {SECONDS} s")
