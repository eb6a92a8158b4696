"""The host's time of a speculative step: a fixed part and a part for each row, learned from recent steps."""

from __future__ import annotations

import numpy as np

from lookfar.core.arrays import Floats

RATE = 0.05  # how fast older steps are forgotten
PRIOR_PER_ROW = 1.5e-6  # seconds, until steps of different sizes were seen
MIN_SPREAD = 2.0  # rows by which sizes have to differ, as a standard deviation, to tell anything


class HostCost:
    """Drafting, planning, verifying and learning, in seconds: `fixed + per_row * rows`."""

    def __init__(self, fixed: float = 0.0, per_row: float = PRIOR_PER_ROW) -> None:
        self.fixed, self.per_row = fixed, per_row
        self._steps = 0.0
        self._means = np.zeros(4)  # of rows, seconds, rows², rows · seconds

    def learn(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
        self._steps += 1
        rate = max(RATE, 1 / self._steps)
        self._means += rate * (np.array([rows, seconds, rows * rows, rows * seconds]) - self._means)
        mean_rows, mean_seconds, squares, products = self._means.tolist()
        spread = squares - mean_rows**2
        if spread > MIN_SPREAD**2:
            slope = (products - mean_rows * mean_seconds) / spread
            self.per_row = min(max(slope, 0.0), mean_seconds / mean_rows)
        self.fixed = max(mean_seconds - self.per_row * mean_rows, 0.0)

    def table(self, most: int) -> Floats:
        """Return the seconds for 0 … `most` rows."""
        return (self.fixed + self.per_row * np.arange(most + 1)).astype(np.float32)


NO_HOST_COST = HostCost(0.0, 0.0)
