"""The row budget: how many draft tokens a step verifies, from their expected gain and the measured cost of rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.core.plan import RunnerLimits, WindowRows
from lookfar.drafters.base import Strategy
from lookfar.drafters.registry import auto_strategies
from lookfar.errors import ConfigError
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.host_cost import HostCost

# Rows a step: as many as pay, a number, or (None) everything that the strategies propose.
Budget = int | Literal["auto"] | None
BudgetKind = Literal["all", "number", "auto"]
AUTO_ROWS = 128  # the most rows that an automatic budget gives one request
MAX_ROWS = 512
ANY_NUMBER = 1 << 30
ANY_SCORE: Floats = np.zeros(1, np.float32)
# An automatic budget ignores candidates below an acceptance probability between these, by the least cost of a row.
MIN_AUTO_SCORE, MAX_MIN_SCORE = np.float32(0.002), np.float32(0.25)
CAUTION = 0.7  # estimates may be too low by this factor
RATE = 0.25  # how fast the expected rate follows the last steps
MAX_USES = 16  # of a table of costs, until it follows what was learned


def check_budget(budget: Any) -> None:
    """Refuse a value that is not a budget."""
    whole = isinstance(budget, int) and not isinstance(budget, bool) and 1 <= budget <= MAX_ROWS
    if budget not in (None, "auto") and not whole:
        raise ConfigError(f"budget must be auto or a number of rows from 1 to {MAX_ROWS}, not {budget!r}.")


def default_budget(strategies: Seq[Strategy]) -> Budget:
    """Return the automatic budget where all automatic sources are used; others verify all that they propose."""
    return "auto" if all(strategy in strategies for strategy in auto_strategies()) else None


def max_draft_rows(strategies: Seq[Strategy], budget: Budget) -> int:
    """Return the most rows that the drafters of a request add to one step."""
    if not strategies:
        return 0
    if budget == "auto":
        return AUTO_ROWS - 1
    if budget is not None:
        return 2 * budget  # in a batch, a confident request takes rows that others leave
    return sum(strategy.max_rows for strategy in strategies)


class Prices:
    """What the rows of steps of one kind cost: on the device and on the host."""

    def __init__(self, costs: CostCurve | None, host: HostCost, kind: str) -> None:
        self.costs = costs  # needed for automatic budgets
        self.host = host
        self.kind = kind  # see `step_kind`
        self._table: Floats = np.zeros(0, np.float32)
        self._device, self._host = self._table, self._table  # the parts of the table
        self._uses = 0
        self._slopes: dict[int, Floats] = {}  # by the length of the table that they are of

    def table(self, most: int) -> Floats:
        """Return the seconds of a step of 0 … `most` rows, as they were known a few steps ago."""
        self._uses += 1
        if len(self._table) <= most or self._uses > MAX_USES:
            assert self.costs is not None
            self._device = self.costs.table(most)[: most + 1] * np.float32(self.costs.drift(self.kind))
            self._host = self.host.table(most)
            self._table, self._uses = self._device + self._host, 0
            self._slopes.clear()
        return self._table[: most + 1]

    def slopes(self, table: Floats) -> Floats:
        """Return the least cost of a further row in steps of 0, 1, … rows."""
        if len(table) not in self._slopes:
            self._slopes[len(table)] = least_slopes(table)
        return self._slopes[len(table)]

    def shared_table(self, busiest: Ints) -> Floats:
        """Return the seconds of steps that ranks share, given the rows of the busiest rank for 0, 1, … rows in all."""
        self.table(len(busiest) - 1)
        return self._device[busiest] + self._host[: len(busiest)]


@dataclass(slots=True)
class Ranking:
    """Candidates of several requests, best first, with the urgency of their requests counted in."""

    scores: Floats
    gains: Floats  # the scores, calibrated
    owners: Int32s  # the request of each, as its place in the batch


@dataclass(slots=True)
class Windows:
    """The lookahead-window rows of some requests, and what they are worth."""

    members: Seq[int]  # places of the requests in the batch
    rows: Seq[tuple[WindowRows, ...]]  # of each, by drafter
    values: Seq[float]  # of each: the tokens that a window is expected to bring

    @property
    def exist(self) -> bool:
        return any(len(window) for of_one in self.rows for window in of_one)

    @property
    def lengths(self) -> Int32s:
        return np.array([sum(map(len, of_one)) for of_one in self.rows], dtype=np.int32)

    @property
    def bonus(self) -> float:
        """The tokens that all windows are expected to bring."""
        return sum(value for value, length in zip(self.values, self.lengths, strict=True) if length)


class StepRows:
    """The rows of a step while it is planned: those that every request feeds already, and the room that is left."""

    def __init__(
        self, lengths: list[int], limits: RunnerLimits, num_prefilling: int = 0, others_wait: bool = False
    ) -> None:
        self.lengths = lengths  # rows of each request
        self.limits = limits
        self.num_prefilling = num_prefilling  # requests that emit no token, because they prefill
        self.others_wait = others_wait  # for a place in the batch
        self._measure()

    def add(self, rows: Seq[int]) -> None:
        """Add draft rows to each request."""
        self.lengths = [length + more for length, more in zip(self.lengths, rows, strict=True)]
        self._measure()

    def _measure(self) -> None:
        self.fed = sum(self.lengths)
        limit = self.limits.rows
        self.room = ANY_NUMBER if limit is None else max(limit - self.fed, 0)

    def busiest(self, rows: Ints) -> Ints:
        """Return the rows of the busiest rank, for numbers of rows in all; every rank has those that are fed anyway."""
        drafts = np.maximum(rows - self.fed, 0)
        return (rows - drafts + np.ceil(self.limits.share * drafts)).astype(np.int64)


@dataclass(slots=True)
class RowBudget:
    """Chooses the draft rows of the requests of a step that share one kind of budget."""

    kind: BudgetKind
    members: Seq[int]  # places of the requests in the batch
    max_rows: Seq[int]  # of every request in the batch: the most rows that it may add
    asked: int  # what the budgets of the requests add up to
    widest: int  # the most rows that one of the requests may add
    rate: float = 0.0  # tokens per second that were expected of the last steps

    @classmethod
    def of(cls, kind: BudgetKind, members: Seq[int], budgets: Seq[Budget], max_rows: Seq[int]) -> RowBudget:
        """Return the budget of requests with budgets of one kind, given those and the limits of the whole batch."""
        asked = sum(max_rows[i] if kind != "number" else int(budgets[i] or 1) - 1 for i in members)
        return cls(kind, members, max_rows, asked, max(max_rows[i] for i in members))

    def least_scores(self, step: StepRows, prices: Prices) -> Floats:
        """Return scores below which a further candidate cannot pay, for each number of those chosen before it.

        It would bring less than its row costs at the least.
        """
        if self.kind != "auto":
            return ANY_SCORE
        table = self._table(step, prices)
        rate = max((len(step.lengths) - step.num_prefilling) / float(table[step.fed]), self.rate)
        slopes = prices.slopes(table) if step.limits.ranks == 1 else least_slopes(table)
        counted = not step.limits.padded and not step.limits.chain
        assert prices.costs is not None
        end = None if counted and not prices.costs.may_explore else step.fed + 1  # one, for any number
        least: Floats = np.maximum(slopes[step.fed : end] * np.float32(CAUTION * rate), MIN_AUTO_SCORE)
        np.minimum(least, MAX_MIN_SCORE, out=least)
        return least

    def _table(self, step: StepRows, prices: Prices) -> Floats:
        """Return the seconds of a step by its rows, with the host's part."""
        most = len(step.lengths) * (max(step.lengths) + self.widest)
        most = most if step.limits.rows is None else min(most, step.limits.rows)
        if step.limits.ranks == 1:
            return prices.table(most)
        return prices.shared_table(step.busiest(np.arange(most + 1)))

    def max_nodes(self, step: StepRows) -> int:
        """Return the most candidates worth building."""
        return min(self.asked, step.room)

    def choose(self, ranking: Ranking, windows: Windows, step: StepRows, prices: Prices) -> tuple[int, bool]:
        """Return how many candidates to verify, best first, and whether the windows are fed."""
        beside = self._fit_beside(ranking, windows, step) if windows.exist else -1
        if self.kind == "auto":
            return self._by_rate(ranking, windows, step, prices, beside)
        if beside < 0:
            return len(ranking.scores), False
        better = ranking.scores[:beside].sum() + windows.bonus > ranking.scores.sum()
        return (beside, True) if self.kind == "all" or better else (len(ranking.scores), False)

    def _fit_beside(self, ranking: Ranking, windows: Windows, step: StepRows) -> int:
        """Return how many candidates, best first, fit beside the windows; -1 if the windows themselves do not."""
        room, lengths = np.array(self.max_rows, np.int32), windows.lengths
        room[list(windows.members)] -= lengths
        left = self.max_nodes(step) - int(lengths.sum())
        if (room < 0).any() or left < 0:
            return -1
        return min(int(count_fitting(ranking.owners, room)), left)

    def _by_rate(
        self, ranking: Ranking, windows: Windows, step: StepRows, prices: Prices, beside: int
    ) -> tuple[int, bool]:
        """Maximise the expected tokens per second; `beside` candidates fit beside the windows, -1: those do not fit."""
        fed: Int32s = np.array(step.lengths, dtype=np.int32)
        table, padded = self._table(step, prices), step.limits.padded
        silent = float(step.num_prefilling)
        if not padded and step.fed > len(fed):
            # Prompt rows cost the same in any step: the drafts beside them must pay as in a step without.
            table = table - (table[step.fed] - table[len(fed) - step.num_prefilling])
        count, rate = best_count(ranking.gains, ranking.owners, fed, table, -silent, padded)
        self.rate += RATE * (rate - self.rate)
        if beside < 0:
            if len(fed) == 1 or not padded:
                count = self._explore(count, len(ranking.scores), step, prices)
            return count, False
        with_windows = fed.copy()
        with_windows[list(windows.members)] += windows.lengths
        gains, owners = ranking.gains[:beside], ranking.owners[:beside]
        other, other_rate = best_count(gains, owners, with_windows, table, windows.bonus - silent, padded)
        return (other, True) if other_rate > rate else (count, False)

    def _explore(self, count: int, most: int, step: StepRows, prices: Prices) -> int:
        """Return how many candidates to verify: `count`, or now and then another number to learn what it costs."""
        assert prices.costs is not None
        before = step.fed
        if step.limits.ranks == 1:
            return prices.costs.explore(before + count, before, before + most) - before
        chosen, largest = step.busiest(before + np.array([count, most])).tolist()
        rows = prices.costs.explore(chosen, before, largest)
        return count if rows == chosen else min(int((rows - before) / step.limits.share), most)


def kind_of(budget: Budget) -> BudgetKind:
    """Return the kind of a budget."""
    return "auto" if budget == "auto" else "all" if budget is None else "number"


@jit
def count_fitting(owners, room):  # type: ignore[no-untyped-def]
    """Return how many candidates, best first, leave every request within its room."""
    taken = np.zeros(len(room), np.int32)
    for i in range(len(owners)):
        taken[owners[i]] += 1
        if taken[owners[i]] > room[owners[i]]:
            return i
    return len(owners)


@jit
def best_count(scores, owners, lengths, costs, bonus, padded):  # type: ignore[no-untyped-def]
    """Return how many candidates, best first, to verify for the highest expected rate, and that rate.

    `lengths` are the rows that each request feeds anyway; if `padded`, every request costs as many rows as the longest.
    `bonus` is added to the expected tokens: gains of windows, minus requests that prefill.
    """
    batch = len(lengths)
    filled = lengths.copy()
    longest, fed = filled.max(), filled.sum()
    gain = batch + bonus
    best, best_rate = 0, gain / costs[min(batch * longest if padded else fed, len(costs) - 1)]
    for i in range(len(scores)):
        gain += scores[i]
        filled[owners[i]] += 1
        longest = max(longest, filled[owners[i]])
        fed += 1
        rate = gain / costs[min(batch * longest if padded else fed, len(costs) - 1)]
        if rate > best_rate:
            best, best_rate = i + 1, rate
    return best, best_rate


@jit
def least_slopes(costs):  # type: ignore[no-untyped-def]
    """Return the least cost of a further row, on average up to any larger number of rows, for 0, 1, … rows."""
    slopes, hull, size = np.zeros(len(costs), np.float32), np.empty(len(costs), np.int64), 0
    for rows in range(len(costs) - 1, -1, -1):
        # The larger numbers that can be the best ones to go to form the lower convex hull, the nearest one last.
        slope = np.float32(0)
        while size:
            slope = (costs[hull[size - 1]] - costs[rows]) / (hull[size - 1] - rows)
            if size == 1 or slope < (costs[hull[size - 2]] - costs[rows]) / (hull[size - 2] - rows):
                break
            size -= 1
        slopes[rows] = max(slope, np.float32(0))
        hull[size] = rows
        size += 1
    return slopes
