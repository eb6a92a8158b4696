"""The best single path of a request, the rows that a step with chains has, and when pending tokens are settled."""

from __future__ import annotations

import numpy as np
import pytest

from lookfar.core.arrays import Floats
from lookfar.speculation.candidates import COLUMNS, DEPTH, OWNER, PARENT
from lookfar.speculation.chains import MAX_PENDING, Chains, ReplayCost, StepWidth, find_chains, path_to
from lookfar.speculation.row_budget import BudgetKind

FLAT = np.ones(65, np.float32)  # seconds by rows: they cost nothing
STEEP = np.arange(65, dtype=np.float32)


def candidates(*rows: tuple[int, int, int]) -> np.ndarray:
    """Candidates with their owner, parent and depth."""
    nodes = np.zeros((len(rows), COLUMNS), np.int32)
    nodes[:, [OWNER, PARENT, DEPTH]] = rows
    return nodes


def chain(values: list[float], num_pending: int = 1, limit: int = 63, kind: BudgetKind = "auto") -> Chains:
    """The paths of a request whose best ones of each length bring `values` in all."""
    sums = np.array([0.0, *values], np.float32)
    return Chains(0, num_pending, limit, kind, sums, np.arange(len(sums), dtype=np.int32))


def test_the_best_path_is_the_one_with_the_largest_sum_not_the_best_first_token() -> None:
    # A root, a likely token that leads nowhere, and a less likely one with a long continuation.
    nodes = candidates((0, -1, 0), (0, 0, 1), (0, 0, 1), (0, 1, 2), (0, 2, 2), (0, 4, 3))
    gains = np.array([1.0, 0.5, 0.45, 0.05, 0.43, 0.41], np.float32)
    values, ends = find_chains(nodes, gains, 1, 3)
    assert values[0] == pytest.approx([0.0, 0.5, 0.88, 1.29])
    assert [path_to(nodes, ends[0, length], length).tolist() for length in (1, 2, 3)] == [[1], [2, 4], [2, 4, 5]]


def test_requests_do_not_share_paths() -> None:
    nodes = candidates((0, -1, 0), (1, -1, 0), (0, 0, 1), (1, 1, 1), (1, 3, 2))
    _, ends = find_chains(nodes, np.full(5, 0.5, np.float32), 2, 2)
    assert ends.tolist() == [[0, 2, -1], [1, 3, 4]]


@pytest.mark.parametrize(("costs", "best"), [(FLAT, 5), (STEEP, 1)])
def test_an_automatic_budget_follows_the_costs(costs: Floats, best: int) -> None:
    assert StepWidth([chain([0.9, 1.7, 2.4, 2.9])], [1], costs).best() == best


def test_a_number_as_budget_is_used() -> None:
    assert StepWidth([chain([0.9, 1.7, 2.4], limit=2, kind="number")], [1], STEEP).best() == 3


def test_all_requests_of_a_step_have_the_same_number_of_rows() -> None:
    """Pending tokens count, and requests without drafts too."""
    longest = StepWidth([chain([0.9, 1.7], num_pending=6), chain([0.5])], [6, 1, 3], FLAT)
    assert longest.least == 6
    assert longest.best() == 8


def test_pending_tokens_are_settled_after_a_fixed_number_if_costs_are_unknown() -> None:
    for pending, settles in ((1, False), (MAX_PENDING, False), (MAX_PENDING + 1, True)):
        rows = StepWidth([chain([0.5], pending, kind="all")], [pending], None)
        assert rows.settle(rows.best(), ReplayCost()) == pending + (not settles)


def test_free_rows_are_never_settled_and_expensive_ones_at_once() -> None:
    replay = ReplayCost()
    for pending in range(2, 60):
        rows = StepWidth([chain([0.9], pending)], [pending], FLAT)
        assert rows.settle(rows.best(), replay) == pending + 1
    steep = (1 + 3 * np.arange(65)).astype(np.float32)
    rows = StepWidth([chain([0.9], 8, kind="number", limit=1)], [8], steep)
    assert rows.settle(rows.best(), ReplayCost()) == 8


@pytest.mark.parametrize("slope", [0.002, 0.01, 0.05])
def test_settling_is_near_the_best_fixed_interval(slope: float) -> None:
    """One token of each draft of four is accepted: pending tokens grow by two in every step until they are settled."""
    costs = (1 + slope * np.arange(2000)).astype(np.float32)
    values = [0.9, 1.0, 1.0, 1.0]

    def rate(interval: int | None) -> float:
        """Tokens per second, settling after a number of steps, or by the policy."""
        replay, tokens, seconds, pending, since = ReplayCost(), 0, 0.0, 1, 0
        for _ in range(2000):
            rows = StepWidth([chain(values, pending, kind="number", limit=4)], [pending], costs)
            width = rows.settle(pending + 4, replay)
            if interval is not None:
                width = pending if since >= interval else pending + 4
            seconds += float(costs[width])
            settled = width == pending
            tokens, pending, since = (tokens + 1, 1, 0) if settled else (tokens + 2, pending + 2, since + 1)
        return tokens / seconds

    assert rate(None) > 0.97 * max(rate(interval) for interval in range(1, 60))
