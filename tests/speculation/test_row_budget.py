"""The number of rows that follows from a cost curve."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lookfar.core.plan import RunnerLimits
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.host_cost import HostCost
from lookfar.speculation.row_budget import Prices, Ranking, RowBudget, StepRows, Windows, best_count, least_slopes

FLAT = CostCurve({1: 1.0, 64: 1.0})
STEEP = CostCurve({1: 1.0, 2: 2.0, 64: 64.0})


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


@given(st.lists(st.floats(0.0, 3.0, width=32), min_size=1, max_size=40))
def test_the_least_cost_of_a_further_row_is_found(costs: list[float]) -> None:
    table = np.array(costs, np.float32)
    for rows, slope in enumerate(least_slopes(table)):
        found = [(table[more] - table[rows]) / (more - rows) for more in range(rows + 1, len(table))]
        assert slope == pytest.approx(max(min(found, default=0.0), 0.0), abs=1e-6)


def test_rows_that_cost_nothing_are_all_taken_and_expensive_ones_not() -> None:
    scores, owners, one = np.full(20, 0.3, np.float32), np.zeros(20, np.int32), np.ones(1, np.int32)
    assert best_count(scores, owners, one, FLAT.table(64), 0.0, True)[0] == 20
    assert best_count(scores, owners, one, STEEP.table(64), 0.0, True)[0] == 0
    assert best_count(scores * 0, owners, one, FLAT.table(64), 0.0, True)[0] == 0  # nothing to gain: no draft tokens


def test_ranks_that_share_the_rows_of_a_step_afford_more_of_them() -> None:
    curve = CostCurve({1: 1.0, 9: 1.8, 17: 2.6, 33: 4.2, 65: 7.4})  # every row costs a tenth of the first
    scores = np.linspace(0.5, 0.02, 60).astype(np.float32)
    ranking = Ranking(scores, scores, np.zeros(60, np.int32))
    budget = RowBudget.of("auto", [0], ["auto"], [100])

    def chosen(ranks: int, share: float) -> tuple[int, np.ndarray]:
        limits = RunnerLimits(padded=False, ranks=ranks, share=share)
        step = StepRows([1], limits)
        count, _ = budget.choose(ranking, Windows((), (), ()), step, Prices(curve, HostCost(), "1"))
        return count, budget._table(step, Prices(curve, HostCost(), "1"))

    (one, alone), (two, shared), (chain, unshared) = chosen(1, 1.0), chosen(2, 0.5), chosen(2, 1.0)
    assert one < two
    assert chain == one  # all drafts on one path: the other rank is no help
    np.testing.assert_allclose(unshared, alone)
    np.testing.assert_allclose(shared[[1, 3, 21]], alone[[1, 2, 11]])  # 20 drafts: the busiest rank has ten of them


def test_drafts_beside_a_prompt_must_pay_as_in_other_steps() -> None:
    """The tokens of a step that reads a prompt are few for its time, which does not make drafts cheaper."""
    curve = CostCurve({1: 1.0, 9: 1.8, 17: 2.6, 33: 4.2, 65: 7.4, 129: 13.8})
    scores = np.linspace(0.5, 0.02, 60).astype(np.float32)
    ranking = Ranking(scores, scores, np.zeros(60, np.int32))

    def chosen(lengths: list[int], prefilling: int) -> int:
        budget = RowBudget.of("auto", [0], ["auto"] * len(lengths), [60] * len(lengths))
        step = StepRows(lengths, RunnerLimits(padded=False), prefilling)
        return budget.choose(ranking, Windows((), (), ()), step, Prices(curve, HostCost(), "1"))[0]

    assert 0 < chosen([1], 0) < 60
    assert chosen([1, 64], 1) == chosen([1], 0)
    assert chosen([64], 0) == chosen([1], 0)  # the last chunk of a prompt
