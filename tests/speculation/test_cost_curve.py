"""The cost curve: measured without what happens once, monotone, refined by real steps of any size, kept in a file."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from lookfar.core.plan import RunnerLimits
from lookfar.speculation.cost_curve import MEASURED_ROWS, CostCurve, measure_curve
from lookfar.speculation.cost_file import Experience, nearest_experience, read_costs, write_costs
from lookfar.speculation.row_budget import best_count

FLAT = CostCurve({1: 1.0, 64: 1.0})
STEEP = CostCurve({1: 1.0, 2: 2.0, 64: 64.0})


def test_between_and_beyond_the_measured_points() -> None:
    table = CostCurve({1: 10.0, 4: 16.0, 8: 20.0}).table(12)
    assert table[[1, 2, 4, 6, 8, 12]].tolist() == [10, 12, 16, 18, 20, 24]
    captured = CostCurve({1: 10.0, 4: 16.0, 8: 20.0}, RunnerLimits(captured=True)).table(17)
    assert captured[[1, 2, 4, 5, 8, 9, 16, 17]].tolist() == [10, 16, 16, 20, 20, 28, 28, 44]
    tiles = CostCurve({1: 10.0, 4: 16.0, 8: 20.0}, RunnerLimits(tiles=(1, 2, 4))).table(11)
    assert tiles.tolist() == [10, 10, 12, 16, 16, 17, 18, 20, 20, 21, 22, 24]


def test_more_rows_never_cost_less() -> None:
    """A busy machine only adds to a time: the smaller of two contradicting ones is right."""
    assert CostCurve({1: 3.95, 2: 1.48, 4: 1.6}).seconds.tolist() == [1.48, 1.48, 1.6]
    curve, chance = CostCurve({1: 1.0, 8: 1.0, 64: 1.0}), random.Random(0)
    for _ in range(500):
        curve.refine(chance.choice([1, 3, 8, 20, 64, 300]), chance.uniform(0.5, 3))
        assert (np.diff(curve.seconds) >= 0).all()


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
    assert slow.drift() == pytest.approx(3.0, rel=0.1)


def test_steps_beyond_the_last_point_refine_too() -> None:
    curve = CostCurve({1: 1.0, 2: 1.05})  # 64 rows would cost 4.1 by the slope of noise
    for _ in range(200):
        curve.refine(1, 1.0)
        curve.refine(64, 1.4)
    assert curve.table(64)[64] == pytest.approx(1.4 * curve.table(64)[1], rel=0.1)


def test_each_kind_of_step_has_its_own_drift() -> None:
    curve = CostCurve({1: 1.0, 64: 2.0})
    for _ in range(100):
        curve.refine(1, 1.0)
        curve.refine(32, 4.5, "32")
    assert curve.seconds_for(1) == pytest.approx(1.0, rel=0.1)
    assert curve.seconds_for(32, "32") == pytest.approx(4.5, rel=0.1)


def test_single_slow_steps_change_little() -> None:
    curve = CostCurve({1: 1.0, 8: 1.2, 64: 2.0})
    for number in range(400):
        curve.refine((1, 8, 64)[number % 3], (1.0, 1.2, 2.0)[number % 3] * (30 if number % 50 == 49 else 1))
    table = curve.table(64)
    assert table[[8, 64]] / table[1] == pytest.approx([1.2, 2.0], rel=0.15)


def test_what_happens_once_is_not_measured() -> None:
    """Capturing and compiling a size takes far longer than its steps."""
    seen: set[int] = set()

    def step(rows: int) -> None:
        time.sleep(0.0005 if rows in seen else 0.05)
        seen.add(rows)

    curve = measure_curve(step)
    assert curve.rows.tolist() == sorted(MEASURED_ROWS)
    assert curve.seconds.max() < 0.02


def test_measuring_stops_when_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.speculation.cost_curve.MAX_SECONDS", 0.05)
    curve = measure_curve(lambda rows: time.sleep(0.002 * rows))
    assert curve.rows.tolist()[:2] in ([1, 16], [1, 4])
    assert len(curve.rows) < len(MEASURED_ROWS)
    assert curve.table(64)[64] > 2 * curve.table(64)[16]


def test_curves_are_kept_by_model_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    write_costs(path, "one", STEEP, {"32": Experience(False, 0.002, 1e-6)})
    write_costs(path, "two", FLAT, {})
    found = read_costs(path, "one")
    assert found is not None
    assert found.curve.table(64).tolist() == STEEP.table(64).tolist()
    assert found.experience == {"32": Experience(False, 0.002, 1e-6)}
    assert read_costs(path, "three") is None
    assert len(json.loads(path.read_text())["curves"]) == 2
    for damaged in ("{ half a fi", "[]", '{"version": 1, "curves": {}}', '{"0c8": {"seconds": {"1": 2}}}'):
        path.write_text(damaged)
        assert read_costs(path, "one") is None
        write_costs(path, "one", STEEP, {})  # an old or damaged file is written again
        assert read_costs(path, "one") is not None
    write_costs(Path("/proc/nowhere/costs.json"), "one", STEEP, {})  # no place to keep it: no error


@pytest.mark.parametrize("seconds", [{}, {1: 0.1}, {1: 0.0, 2: 1.0}, {1: float("nan"), 2: 1.0}, {2: 1.0, 4: 1.0}])
def test_nonsense_in_a_file_is_measured_again(tmp_path: Path, seconds: dict[int, float]) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, "one", FLAT, {})
    contents = json.loads(path.read_text())
    next(iter(contents["curves"].values()))["seconds"] = seconds
    path.write_text(json.dumps(contents))
    assert read_costs(path, "one") is None


# The rows that are chosen with a curve that learns, against the best fixed number


def rate_of(truth: CostCurve, learned: CostCurve, chances: list[float], steps: int, seed: int = 0) -> float:
    """Tokens per second of a simulated chain of drafts: each token is accepted with its chance, after those before."""
    chance = random.Random(seed)
    scores = np.cumprod(np.array(chances, np.float32))
    owners, one = np.zeros(len(scores), np.int32), np.ones(1, np.int32)
    tokens = seconds = 0.0
    for _ in range(steps):
        count = int(best_count(scores, owners, one, learned.table(len(scores) + 1), 0.0, False)[0])
        count = learned.explore(1 + count, 1, 1 + len(scores)) - 1
        accepted = 0
        while accepted < count and chance.random() < chances[accepted]:
            accepted += 1
        cost = float(truth.table(len(scores) + 1)[1 + count]) * chance.uniform(0.97, 1.05)
        learned.refine(int(truth._computed(np.array([1.0 + count]))[0]), cost)
        tokens, seconds = tokens + 1 + accepted, seconds + cost
    return tokens / seconds


TRUTHS = {
    "flat": {1: 1.2, 2: 1.22, 4: 1.23, 8: 1.25, 16: 1.3, 32: 1.4, 64: 1.6, 128: 2.0},
    "steep": {1: 40.0, 2: 44.0, 4: 55.0, 8: 75.0, 16: 120.0, 32: 210.0, 64: 400.0, 128: 800.0},
    "knee": {1: 5.0, 2: 5.0, 4: 5.1, 8: 5.2, 16: 5.3, 32: 9.0, 64: 17.0, 128: 34.0},
}
LIMITS = [
    pytest.param(RunnerLimits(), id="any rows"),
    pytest.param(RunnerLimits(captured=True), id="captured"),
    pytest.param(RunnerLimits(tiles=(1, 2, 4, 8, 12, 16)), id="tiles"),
]
BEGINNINGS = {
    "right": lambda truth: truth,
    "two points": lambda truth: {1: truth[1], 2: truth[1] * 1.03},
    "busy at the end": lambda truth: {n: s * (1 if n < 8 else 3) for n, s in truth.items()},
    "busy at the start": lambda truth: {n: s * (3 if n < 8 else 1) for n, s in truth.items()},
    "twice as slow": lambda truth: {n: 2 * s for n, s in truth.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("chances", [[0.9] * 63, [0.6] * 63, [0.05] * 63], ids=["likely", "middling", "unlikely"])
def test_regret(truth: str, beginning: str, chances: list[float], limits: RunnerLimits) -> None:
    """The rate comes near that of the best fixed number of rows, however wrong the curve was at first."""
    real = CostCurve(TRUTHS[truth], limits)
    scores = np.cumprod(chances)
    gains = 1 + np.concatenate([[0.0], np.cumsum(scores)])
    best = float((gains / real.table(64)[1:65]).max())
    learned = CostCurve(BEGINNINGS[beginning](TRUTHS[truth]), limits)
    first, then = (rate_of(real, learned, chances, 3000, seed) * 1.01 / best for seed in (0, 1))  # noise adds 0.01
    assert first > (0.97 if beginning in ("right", "twice as slow") else 0.84)
    assert then > 0.95


@pytest.mark.parametrize("limits", LIMITS)
def test_exploration_keeps_to_the_rows_that_there_are(limits: RunnerLimits) -> None:
    chance = random.Random(0)
    for _ in range(30):
        curve = CostCurve(TRUTHS["flat"], limits)
        for _ in range(400):
            least = chance.randint(1, 70)
            most = least + chance.randint(0, 200)
            chosen = chance.randint(least, most)
            rows = curve.explore(chosen, least, most)
            assert least <= rows <= most
            curve.refine(rows, chance.uniform(1, 2), chance.choice(["1", "8"]))


def test_exploration_costs_what_it_may() -> None:
    curve = CostCurve(TRUTHS["steep"])
    spent = extra = 0.0
    for _ in range(5000):
        rows = curve.explore(4, 1, 64)
        cost = float(CostCurve(TRUTHS["steep"]).table(64)[rows])
        spent, extra = spent + cost, extra + max(cost - 55.0, 0)
        curve.refine(rows, cost)
    assert 0 < extra < 0.01 * spent


def test_steps_of_a_new_kind_begin_with_what_is_known_of_the_nearest() -> None:
    eight, sampled = Experience(False, 0.001, 1e-5), Experience(True, 0.002, 1e-5)
    known = {"1": Experience(True, 0.0001, 0.0), "8": eight, "8 sampled": sampled}
    assert nearest_experience(known, "8") == eight
    assert nearest_experience(known, "16") == Experience(False, 0.002, 1e-5)
    assert nearest_experience(known, "2") == Experience(True, 0.0002, 0.0)
    assert nearest_experience(known, "32 sampled") == Experience(True, 0.008, 1e-5)
    assert nearest_experience({"1 sampled": sampled}, "1") is None
    alone = nearest_experience({"1 sampled": Experience(True, 0.001, 1e-5)}, "8 sampled")
    assert alone == Experience(False, 0.008, 1e-5)
