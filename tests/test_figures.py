"""`benchmarks/figures.py` keeps the reports of benchmarks with their commands, also when another one fails."""

from __future__ import annotations

import json
from pathlib import Path

import figures
import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "right.py").write_text(
        "import sys\nprint('a table')\nprint('{\"data\": \"%s\"}' % sys.argv[2])"
    )
    (tmp_path / "benchmarks" / "wrong.py").write_text("raise SystemExit(3)")
    (tmp_path / "benchmarks" / "tables.py").write_text("open('rendered', 'w')")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    commands = {name: f"python benchmarks/{name}.py --data DIR" for name in ("wrong", "right")}
    monkeypatch.setattr(figures, "COMMANDS", commands)
    return tmp_path


def test_reports_are_kept_with_their_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "wrong.json").write_text("earlier")
    monkeypatch.setattr("sys.argv", ["figures.py", "--data", str(folder), "--only", "wrong,right"])
    with pytest.raises(SystemExit, match="wrong"):
        figures.main()
    assert (folder / "wrong.json").read_text() == "earlier"
    kept = json.loads((folder / "right.json").read_text())
    assert kept["command"] == "python benchmarks/right.py --data DIR"
    assert kept["report"] == {"data": str(folder.resolve())}
    assert {"measured", "machine", "torch", "transformers"} <= kept.keys()
    assert (folder / "rendered").exists()


def test_unknown_names_and_folders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--data", str(folder), "--only", "nonsense"], ["--data", str(folder / "nowhere")]):
        monkeypatch.setattr("sys.argv", ["figures.py", *arguments])
        with pytest.raises(SystemExit) as refused:
            figures.main()
        assert refused.value.code == 2


def test_every_measurement_has_an_estimate_of_its_time() -> None:
    assert figures.MINUTES.keys() == figures.COMMANDS.keys()
