"""The cost curve and the number of rows that follows from it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lookfar.speculation.cost_curve import CostCurve, measure_curve, read_curve, write_curve
from lookfar.speculation.row_budget import best_count

FLAT = CostCurve({1: 1.0, 64: 1.0})
STEEP = CostCurve({1: 1.0, 2: 2.0, 64: 64.0})


def test_between_and_beyond_the_measured_points() -> None:
    table = CostCurve({1: 10.0, 4: 16.0, 8: 20.0}).table(12)
    assert table[[1, 2, 4, 6, 8, 12]].tolist() == [10, 12, 16, 18, 20, 24]


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.integers(0, 2)), max_size=20),
    st.lists(st.floats(0.1, 5), min_size=6, max_size=6),
)
@settings(max_examples=200)
def test_the_count_with_the_best_rate_is_found(candidates: list[tuple[float, int]], seconds: list[float]) -> None:
    curve = CostCurve(dict(zip((1, 4, 8, 16, 32, 64), seconds, strict=True)))
    candidates.sort(reverse=True)
    scores = np.array([score for score, _ in candidates], np.float32)
    owners = np.array([owner for _, owner in candidates], np.int32)
    widths = np.array([1, 3, 1], np.int32)

    def rate(count: int) -> float:
        rows = widths + np.bincount(owners[:count], minlength=3)
        return float((3 + scores[:count].sum()) / curve.table(99)[3 * rows.max()])

    count, found = best_count(scores, owners, widths, curve.table(99), 0.0, True)
    assert found == pytest.approx(rate(count), rel=1e-4)
    assert found >= max(map(rate, range(len(scores) + 1))) * (1 - 1e-4)


def test_rows_that_cost_nothing_are_all_taken_and_expensive_ones_not() -> None:
    scores, owners, one = np.full(20, 0.3, np.float32), np.zeros(20, np.int32), np.ones(1, np.int32)
    assert best_count(scores, owners, one, FLAT.table(64), 0.0, True)[0] == 20
    assert best_count(scores, owners, one, STEEP.table(64), 0.0, True)[0] == 0
    assert best_count(scores * 0, owners, one, FLAT.table(64), 0.0, True)[0] == 0  # nothing to gain: no draft tokens


def test_real_steps_refine_the_shape_but_not_for_a_slow_machine() -> None:
    curve = CostCurve({1: 1.0, 8: 1.0, 64: 1.0})
    for _ in range(300):
        curve.refine(1, 1.0)
        curve.refine(8, 2.0)
    table = curve.table(64)
    assert table[8] / table[1] == pytest.approx(2.0, rel=0.1)
    slow = CostCurve({1: 1.0, 8: 1.2, 64: 4.0})
    for _ in range(300):
        slow.refine(1, 3.0)
        slow.refine(8, 3.6)
    assert slow.table(64)[8] / slow.table(64)[1] == pytest.approx(1.2, rel=0.05)
    slow.refine(10_000, 1.0)  # a step beyond what was measured teaches nothing


def test_measuring_stops_when_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("lookfar.speculation.cost_curve.MAX_SECONDS", 0.05)

    def step(rows: int) -> None:
        asked.append(rows)
        time.sleep(0.002 * rows)

    curve = measure_curve(step)
    assert asked[:2] == [1, 1]
    assert 2 <= len(curve.rows) < 8
    assert curve.table(64)[64] > curve.table(64)[2]


def test_curves_are_kept_by_model_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    write_curve(path, "one", STEEP)
    write_curve(path, "two", FLAT)
    found = read_curve(path, "one")
    assert found is not None
    assert found.table(64).tolist() == STEEP.table(64).tolist()
    assert read_curve(path, "three") is None
    assert len(json.loads(path.read_text())) == 2
    path.write_text("{ half a fi")
    assert read_curve(path, "one") is None
    write_curve(path, "one", STEEP)  # a damaged file is written again
    assert read_curve(path, "one") is not None
    write_curve(Path("/proc/nowhere/costs.json"), "one", STEEP)  # no place to keep it: no error
