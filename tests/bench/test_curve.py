"""The cost curve in use, next to fresh measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lookfar
from families import tiny_model
from lookfar.bench.curve import NO_CURVE, CurveCheck, check_curve
from lookfar.bench.steps import StepCosts, steps_page
from lookfar.cli import app
from lookfar.engine.costs import costs_file, machine_and_model
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.cost_file import write_costs

CHECK = CurveCheck({1: 2.0, 4: 2.0, 16: 4.0}, {1: 4.0, 4: 4.0, 16: 20.0}, {1: 7.0, 4: 0.0, 16: 0.0})


def test_drift_and_shape() -> None:
    """All steps are twice as slow as the curve says, and 16 rows are more than that."""
    assert CHECK.drift == 2.0
    assert [CHECK.ratio(rows) for rows in CHECK.kept] == [2.0, 2.0, 5.0]
    assert [CHECK.shape(rows) for rows in CHECK.kept] == [1.0, 1.0, 2.5]
    assert CHECK.table()[2] == ["16", "4.00 ms", "20.00 ms", "5.00", "2.50", "0"]
    partly = CurveCheck(CHECK.kept, {1: 4.0}, CHECK.visits)
    assert partly.ratio(16) is None
    assert partly.table()[2] == ["16", "4.00 ms", "–", "–", "–", "0"]
    assert json.loads(json.dumps(partly.as_dict()))["ratio"] == {"1": 2.0, "4": None, "16": None}


def test_the_page_shows_it() -> None:
    costs = StepCosts("m", "d", "s", {128: {1: 1.0, 2: 1.1}}, weight_bytes=1, bandwidth=1.0)
    assert "2.50" in steps_page(costs, CHECK)
    assert "2.00 times as slow" in steps_page(costs, CHECK)
    assert NO_CURVE in steps_page(costs).replace("&#39;", "'")


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.engine.costs.cache_dir", lambda: tmp_path)
    lm = lookfar.LM(tiny_model("llama", max_position_embeddings=1024))
    monkeypatch.setattr("lookfar.loading.load", lambda *_, **__: lm)

    def run(*options: str) -> Any:
        result = CliRunner().invoke(app, ["bench", "steps", "--model", "tiny", "--contexts", "16", *options])
        assert result.exception is None, result.exception
        return result.stdout

    assert check_curve(lm.engine.runner) is None
    assert NO_CURVE in " ".join(run().split())
    assert json.loads(run("--json"))["cost_curve"] is None
    curve = CostCurve({1: 1.0, 2: 1.5, 32: 9.0}, visits={1: 40.0})
    write_costs(costs_file(), machine_and_model(lm.engine.runner), curve, {})
    found = json.loads(run("--json", "--html", str(tmp_path / "page.html")))["cost_curve"]
    assert found["kept"] == {"1": 1000.0, "2": 1500.0, "32": 9000.0}
    assert found["visits"]["1"] == 40.0
    assert set(found["fresh"]) == {"1", "2", "32"}
    assert all(0 < now < 500 for now in found["fresh"].values())  # milliseconds of a tiny model
    assert found["drift"] == pytest.approx(sorted(found["ratio"].values())[1])
    assert "1000.00 ms" in (tmp_path / "page.html").read_text()
    assert "The cost curve in use" in run()
