"""The host's time of a speculative step: a fixed part and a part for each row, learned from recent steps."""

from __future__ import annotations

import numpy as np

from lookfar.core.arrays import Floats

RATE = 0.05  # how fast older steps are forgotten
OUTLIER = 3.0  # times the usual: what a step that waited for something else counts as
FIRST_STEPS = 8  # which may all have waited: a step that is much faster starts over
SPREAD = 8.0  # rows: if sizes differ by this standard deviation, the measured slope and the assumed one count the same
ROWS_SHARE = 0.4  # of the time is for rows at the least, and as much is assumed
ALONE_SHARE = 0.15  # the same where one request is alone: calls are most of the cost of small steps


class HostCost:
    """Drafting, planning, verifying and learning, in seconds: `fixed + per_row * rows`."""

    def __init__(self, fixed: float = 0.0, per_row: float = 0.0, alone: bool = False) -> None:
        self.fixed, self.per_row = fixed, per_row
        self._rows_share = ALONE_SHARE if alone else ROWS_SHARE
        self._steps = 0
        self._rows = self._seconds = self._squares = self._products = 0.0  # means

    def learn(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
        if self._steps < FIRST_STEPS and OUTLIER * seconds < self._seconds:
            self._steps = 0
        elif self._steps:
            seconds = min(seconds, OUTLIER * self._seconds)
        self._steps += 1
        rate = max(RATE, 1 / self._steps)
        self._rows += rate * (rows - self._rows)
        self._seconds += rate * (seconds - self._seconds)
        self._squares += rate * (rows * rows - self._squares)
        self._products += rate * (rows * seconds - self._products)
        spread, average = self._squares - self._rows**2, self._seconds / self._rows
        least = self._rows_share * average
        slope = (self._products - self._rows * self._seconds + SPREAD**2 * least) / (spread + SPREAD**2)
        self.per_row = min(max(slope, least), average)
        self.fixed = self._seconds - self.per_row * self._rows

    def table(self, most: int) -> Floats:
        """Return the seconds for 0 … `most` rows."""
        return (self.fixed + self.per_row * np.arange(most + 1)).astype(np.float32)
