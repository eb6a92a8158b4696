"""The programs in examples/ and the notebook run with the demo model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import notebooks
from live_server import byte_lm, live_server

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = ("drop_in", "streaming", "json_schema", "own_drafter")


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.real
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng():
        run(name, monkeypatch)
    out = capsys.readouterr().out
    assert "steps" in out or "step" in out


def test_the_client_of_the_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    with live_server(byte_lm()) as server:
        run("openai_client", monkeypatch, server.url)
    assert "tokens_per_step" in capsys.readouterr().out


@pytest.mark.real
def test_the_notebook() -> None:
    """Its cells run, and print as much as the notebook shows."""
    path = EXAMPLES / "tour.ipynb"
    with torch.random.fork_rng():
        printed = notebooks.run(path)
    shown = [
        "".join(text for output in cell["outputs"] for text in output["text"])
        for cell in notebooks.code_cells(json.loads(path.read_text()))
    ]
    assert [bool(text) for text in printed] == [bool(text) for text in shown], "run python tests/notebooks.py"


def test_every_example_is_tested_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")} | {path.name for path in EXAMPLES.glob("*.ipynb")}
    assert names == {*(f"{name}.py" for name in (*SCRIPTS, "openai_client")), "tour.ipynb"}
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert all(f"../examples/{name}" in page for name in names)
