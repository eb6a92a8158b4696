"""The cost curve: seconds of a step by its number of rows, measured once and refined by real steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence as Seq
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np

from lookfar.core.arrays import Floats
from lookfar.core.files import read_json, update_json

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_SECONDS = 4.0  # spent on measuring; larger steps are extrapolated
SHAPE_RATE, DRIFT_RATE = 0.03, 0.2
REFRESH_STEPS = 16  # steps after which the table of costs follows the refined curve


class CostCurve:
    """Seconds of a step by the rows that it computes, those of all requests together, padding included.

    Real steps refine the curve. A machine that gets slower or faster as a whole changes the drift and not the shape,
    because the shape alone decides how many rows pay.
    """

    def __init__(self, seconds: dict[int, float], stepped: bool = False) -> None:
        self.stepped = stepped  # captured steps compute the next larger measured number of rows
        self.rows = np.array(sorted(seconds), dtype=np.float64)
        self.seconds = np.array([seconds[int(n)] for n in self.rows])
        self.drift = 1.0
        self.refined = 0
        self._table: Floats = np.zeros(0, np.float32)

    def table(self, most: int) -> Floats:
        """Return the costs of 0 … `most` rows; beyond the last point the slope of the last two continues."""
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

    def seconds_for(self, rows: int) -> float:
        """Return the present cost of a step."""
        return float(self.table(rows)[rows] * self.drift)

    def refine(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
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
        if self.refined % REFRESH_STEPS == 0:
            self._table = self._table[:0]


def measure_curve(step: Callable[[int], None], sizes: Seq[int] = MEASURED_ROWS, stepped: bool = False) -> CostCurve:
    """Measure a step of each size: the median of three, or one where steps are slow, after a warm-up."""
    seconds: dict[int, float] = {}
    step(1)  # packing and compiling happen here
    began = perf_counter()
    for rows in sizes:
        if len(seconds) > 1 and perf_counter() - began > MAX_SECONDS:
            break
        times: list[float] = []
        step(rows)  # a new size may be captured or compiled
        while len(times) < 3 and sum(times) < MAX_SECONDS / 8:
            start = perf_counter()
            step(rows)
            times.append(perf_counter() - start)
        seconds[rows] = float(np.median(times))
    return CostCurve(seconds, stepped)


def read_curve(path: Path, key: str, stepped: bool = False) -> CostCurve | None:
    """Read the curve of a model on a machine; None if the file has none, or cannot be read."""
    try:
        kept = read_json(path)[_digest(key)]["seconds"]
        return CostCurve({int(rows): float(seconds) for rows, seconds in kept.items()}, stepped)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_curve(path: Path, key: str, curve: CostCurve) -> None:
    """Keep a curve for later processes. If it cannot be written, it is measured again next time."""
    record = {"of": key, "seconds": {int(n): float(s) for n, s in zip(curve.rows, curve.seconds, strict=True)}}
    with suppress(OSError):
        update_json(path, lambda known: (known if isinstance(known, dict) else {}) | {_digest(key): record})


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
