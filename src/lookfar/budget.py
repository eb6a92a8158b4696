"""How many rows a step should have: what they are expected to bring against what they were measured to cost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence as Seq
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np

from lookfar.arrays import Floats
from lookfar.files import change_json, read_json
from lookfar.jit import jit

MEASURED = (1, 2, 4, 8, 16, 32, 64, 128)  # rows
PATIENCE = 4.0  # seconds to spend on measuring; what is left then is extrapolated
SHAPE_RATE, DRIFT_RATE = 0.03, 0.2
REFRESH = 16  # steps after which what they taught is looked at


class CostCurve:
    """Seconds of a step by its rows, those of all sequences together and padding among them.

    Real steps refine it. A machine that gets slower or faster as a whole moves the drift, not the shape, because the
    shape alone decides how many rows pay.
    """

    def __init__(self, seconds: dict[int, float], stepped: bool = False) -> None:
        self.stepped = stepped  # captured steps have the next measured number of rows
        self.rows = np.array(sorted(seconds), dtype=np.float64)
        self.seconds = np.array([seconds[int(n)] for n in self.rows])
        self.drift = 1.0
        self.refined = 0
        self._table: Floats = np.zeros(0, np.float32)

    def table(self, most: int) -> Floats:
        """The cost of 0 … `most` rows; beyond what was measured, it goes on as between the last two points."""
        if len(self._table) <= most:
            wanted = np.arange(most + 1, dtype=np.float64)
            slope = 0.0
            if len(self.rows) > 1:
                slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            beyond = np.maximum(wanted - self.rows[-1], 0) * max(slope, 0.0)
            if self.stepped:
                wanted = self.rows[np.searchsorted(self.rows, wanted).clip(max=len(self.rows) - 1)]
            self._table = (np.interp(wanted, self.rows, self.seconds) + beyond).astype(np.float32)
        return self._table

    def refine(self, rows: int, seconds: float) -> None:
        """Learn from a step that was taken."""
        if rows > self.rows[-1]:
            return
        ratio = min(max(seconds / (float(np.interp(rows, self.rows, self.seconds)) * self.drift), 0.5), 2.0)
        self.drift *= ratio**DRIFT_RATE
        above = int(np.searchsorted(self.rows, rows))
        below = max(above - 1, 0) if self.rows[above] != rows else above
        width = self.rows[above] - self.rows[below]
        share = (rows - self.rows[below]) / width if width else 1.0
        self.seconds[below] *= ratio ** (SHAPE_RATE * (1 - share))
        self.seconds[above] *= ratio ** (SHAPE_RATE * share)
        self.refined += 1
        if self.refined % REFRESH == 0:
            self._table = self._table[:0]


def measure(step: Callable[[int], None], sizes: Seq[int] = MEASURED, stepped: bool = False) -> CostCurve:
    """Measure a step of each size: the median of three, or just one where steps are slow, after one to warm up."""
    seconds: dict[int, float] = {}
    step(1)  # whatever is done once (packing, compiling) is done here
    began = perf_counter()
    for rows in sizes:
        if len(seconds) > 1 and perf_counter() - began > PATIENCE:
            break
        times: list[float] = []
        step(rows)  # a new size may be captured or compiled
        while len(times) < 3 and sum(times) < PATIENCE / 8:
            start = perf_counter()
            step(rows)
            times.append(perf_counter() - start)
        seconds[rows] = float(np.median(times))
    return CostCurve(seconds, stepped)


def read_curve(path: Path, key: str, stepped: bool = False) -> CostCurve | None:
    """The curve kept for a model on a machine; None if there is none that can be read."""
    try:
        kept = read_json(path)[_digest(key)]["seconds"]
        return CostCurve({int(rows): float(seconds) for rows, seconds in kept.items()}, stepped)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_curve(path: Path, key: str, curve: CostCurve) -> None:
    """Keep a curve for later processes. Without a place to write to, it is measured again next time."""
    record = {"of": key, "seconds": {int(n): float(s) for n, s in zip(curve.rows, curve.seconds, strict=True)}}
    with suppress(OSError):
        change_json(path, lambda known: (known if isinstance(known, dict) else {}) | {_digest(key): record})


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@jit
def best_count(scores, owners, widths, costs, bonus, packed=False):  # type: ignore[no-untyped-def]
    """How many of the candidates, best first, to feed, and the tokens per second expected then.

    `widths` are the rows that each sequence feeds anyway; unless rows are packed, every sequence is padded to the
    widest. `bonus` is what rows that are fed anyway bring later.
    """
    batch = len(widths)
    filled = widths.copy()
    widest, fed = filled.max(), filled.sum()
    gain = batch + bonus
    best, best_rate = 0, gain / costs[min(fed if packed else batch * widest, len(costs) - 1)]
    for i in range(len(scores)):
        gain += scores[i]
        filled[owners[i]] += 1
        widest = max(widest, filled[owners[i]])
        fed += 1
        rate = gain / costs[min(fed if packed else batch * widest, len(costs) - 1)]
        if rate > best_rate:
            best, best_rate = i + 1, rate
    return best, best_rate
