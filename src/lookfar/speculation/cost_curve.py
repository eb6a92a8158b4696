"""The cost curve: seconds of a step by its number of rows, measured once and refined by real steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from time import perf_counter

import numpy as np

from lookfar.core.arrays import Doubles, Floats
from lookfar.core.plan import RunnerLimits

MEASURED_ROWS = (1, 16, 64, 4, 32, 128, 2, 8)  # the most telling first: where steps are slow, measuring ends early
NEEDED = 2  # sizes that are measured however slow they are
MAX_SECONDS = 2.0  # of timed steps; real steps refine the curve
MAX_WAIT = 60.0  # with all that is compiled and captured meanwhile
TIMES = 5  # each size is measured; the fastest counts, because a busy machine only adds to it

WARM_UP = 8  # real steps that tell how fast the machine is today, before the shape learns
DRIFT_RATE, SHAPE_RATE = 0.2, 0.03
YOUNG = 2  # real steps of a size until its cost is only changed little by little
MUCH, LITTLE = math.log(4), 0.2  # the most that one step can say about a cost, as a logarithm
REFRESH_STEPS = 16  # steps after which the table of costs follows the refined curve
EXPLORATION = 0.005  # of the time may be spent on sizes that seem not to pay, to learn whether that is true
ALONE = "1"  # the kind of a step with one request
NO_LIMITS = RunnerLimits()
NEW_SIZE = 0.25  # of the price is enough where no real step has had that size: its cost may be much lower


class CostCurve:
    """Seconds of a step by the rows that it computes, those of all requests together, padding included.

    A step with more rows never costs less. Real steps refine the curve. What makes all steps slower or faster (a busy
    machine, a longer text, more requests) changes the drift and not the shape, because the shape alone decides how
    many rows pay.
    """

    def __init__(
        self, seconds: dict[int, float], limits: RunnerLimits = NO_LIMITS, visits: dict[int, float] | None = None
    ) -> None:
        self.limits = limits
        self.rows = np.array(sorted(seconds), dtype=np.float64)
        self.seconds = np.array([seconds[int(n)] for n in self.rows])
        self.seconds = np.minimum.accumulate(self.seconds[::-1])[::-1].copy()
        self.visits = np.array([(visits or {}).get(int(n), 0.0) for n in self.rows])  # by real steps
        self.refined = 0  # real steps of this process
        self._drifts: dict[str, tuple[float, int]] = {}  # by the kind of step, with the steps behind it
        self._credit = 0.0  # seconds for exploration
        self.may_explore = False  # in the next step
        self._explored = 0.0  # what the step that was chosen would have cost, if another size is tried instead
        self._table: Floats = np.zeros(0, np.float32)

    def drift(self, kind: str = ALONE) -> float:
        """Return by how much steps of a kind are slower than the curve."""
        return self._drifts.get(kind, (1.0, 0))[0]

    def table(self, most: int) -> Floats:
        """Return the costs of 0 … `most` rows."""
        if len(self._table) <= most:
            self._extend(most)
            computed = self._computed(np.arange(most + 1, dtype=np.float64))
            self._table = np.interp(computed, self.rows, self.seconds).astype(np.float32)
        return self._table

    def _computed(self, rows: Doubles) -> Doubles:
        """Return how many rows are computed in steps of so many."""
        found = rows
        if self.limits.captured:
            found = self.rows[np.searchsorted(self.rows, rows)]
        elif self.limits.tiles:
            sizes = np.array([0, *self.limits.tiles])
            in_full = rows // sizes[-1] * sizes[-1]
            found = in_full + sizes[np.searchsorted(sizes, rows - in_full)]
        return found

    def _extend(self, most: int) -> None:
        """Add points up to `most` rows, where the slope of the last two continues."""
        while self.rows[-1] < most:
            slope = 0.0
            if len(self.rows) > 1:
                slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            self.seconds = np.append(self.seconds, self.seconds[-1] + slope * self.rows[-1])
            self.rows = np.append(self.rows, 2 * self.rows[-1])
            self.visits = np.append(self.visits, 0.0)

    def seconds_for(self, rows: int, kind: str = ALONE) -> float:
        """Return the present cost of a step."""
        return float(self.table(rows)[rows] * self.drift(kind))

    def refine(self, rows: int, seconds: float, kind: str = ALONE) -> None:
        """Learn from a step that computed so many rows."""
        self._extend(rows)
        drift, steps = self._drifts.get(kind, (1.0, 0))
        expected = float(np.interp(rows, self.rows, self.seconds)) * drift
        error = math.log(seconds / expected)
        if steps < WARM_UP:
            drift *= math.exp(_clip(error, MUCH) / (1 + steps))
        else:
            young = self._refine_shape(rows, error)
            drift *= 1.0 if young else math.exp(DRIFT_RATE * _clip(error, LITTLE))
        self._drifts[kind] = drift, steps + 1
        if self._explored:
            self._credit -= max(seconds / drift - self._explored, 0.0)
            self._explored = 0.0
        self.refined += 1
        if self.refined % REFRESH_STEPS == 0:
            self._table = self._table[:0]
            self.may_explore = True

    def _refine_shape(self, rows: int, error: float) -> bool:
        """Change the points next to a number of rows; returns whether one of them was new to real steps."""
        above = int(np.searchsorted(self.rows, rows))
        below = max(above - 1, 0) if self.rows[above] != rows else above
        width = self.rows[above] - self.rows[below]
        share = (rows - self.rows[below]) / width if width else 1.0
        young = False
        for point, part in ((below, 1 - share), (above, share)):
            new = self.visits[point] < YOUNG
            rate, limit = (0.7, MUCH) if new else (SHAPE_RATE, LITTLE)
            first, last = self._unknown_around(point) if new else (point, point + 1)
            self.visits[point] += part
            self.seconds[first:last] *= math.exp(rate * part * _clip(error, limit))
            self.seconds[point:] = np.maximum.accumulate(self.seconds[point:])
            self.seconds[: point + 1] = np.minimum.accumulate(self.seconds[point::-1])[::-1]
            young = young or (new and part > 0.3)
        if young:
            self._table = self._table[:0]
        return young

    def _unknown_around(self, point: int) -> tuple[int, int]:
        """Return the range of a point and its neighbours that no real step has had: they are wrong in the same way."""
        first, last = point, point + 1
        while first > 0 and self.visits[first - 1] == 0:
            first -= 1
        while last < len(self.visits) and self.visits[last] == 0:
            last += 1
        return first, last

    def explore(self, chosen: int, least: int, most: int) -> int:
        """Return the rows of the next step: those chosen, or now and then another number to learn its cost.

        At most `EXPLORATION` of the time goes into it, and a little more where a size is new.
        """
        table = self.table(max(chosen, most))
        self._credit += EXPLORATION * float(table[chosen])
        if not self.may_explore:
            return chosen
        self.may_explore = False
        own = int(np.searchsorted(self.rows, chosen))
        options = []
        for point, size in enumerate(self.rows):
            rows = min(int(size), most)
            if rows < least:
                continue
            reached = rows > (self.rows[point - 1] if point else 0) if self.limits.captured else size < 2 * most
            if point == own or not reached:
                continue
            price = float(table[rows] - table[chosen]) if rows > chosen else float(table[chosen]) / 2
            new = self.visits[point] < YOUNG
            options.append((not new, int(self.visits[point]), price, rows))
        if not options:
            return chosen
        known, _, price, rows = min(options)  # new ones first, then the rarest, then the cheapest
        if price * (1.0 if known else NEW_SIZE) > self._credit:
            return chosen
        if rows > chosen:
            self._explored = float(table[chosen])
        else:
            self._credit -= price
        return rows

    def as_measured(self) -> dict[int, float]:
        """Return the points, as fast as the machine is with one request."""
        return {int(n): float(s * self.drift()) for n, s in zip(self.rows, self.seconds, strict=True)}


def measure_curve(
    step: Callable[[int], None],
    sizes: Seq[int] = MEASURED_ROWS,
    limits: RunnerLimits = NO_LIMITS,
    advance: Callable[[int], None] = lambda _: None,
) -> CostCurve:
    """Measure a step of each size. Each is run once before: it may be captured, compiled or packed for."""
    seconds: dict[int, float] = {}
    spent, began = 0.0, perf_counter()
    for rows in sizes:
        if len(seconds) >= NEEDED and (spent > MAX_SECONDS or perf_counter() - began > MAX_WAIT):
            break
        step(rows)
        times: list[float] = []
        while len(times) < TIMES and sum(times) < MAX_SECONDS / len(MEASURED_ROWS):
            start = perf_counter()
            step(rows)
            times.append(perf_counter() - start)
        seconds[rows] = min(times)
        spent += sum(times)
        advance(1)
    return CostCurve(seconds, limits)


def step_kind(requests: int, sampled: bool = False) -> str:
    """Return the kind of a step; steps of one kind share what is learned about their times.

    It is the number of requests, up to a power of two, and whether tokens are sampled, which takes time of its own.
    """
    return f"{1 << (requests - 1).bit_length()}{' sampled' if sampled else ''}"


def _clip(error: float, limit: float) -> float:
    return min(max(error, -limit), limit)
