"""How much a token of each request counts when rows are given out and speculation is judged.

While requests wait for a place, every token counts the same: whoever is done makes room. A batch that nobody waits for
is done when its slowest request is, so tokens count by the steps that their request still needs. Rows then go to the
texts that are hard to guess, where otherwise most would go to those that will be done first anyway.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from lookfar.core.arrays import Floats

POWER = 2.0  # of the steps that are left
INTERVAL = 8  # steps after which it is computed again
MIN_URGENCY = 0.1


class RunningRequest(Protocol):
    @property
    def steps_left(self) -> float:
        """The steps that it needs at its rate so far, if it is not stopped before."""


class Urgency:
    """The urgency of the requests of a batch, on average 1."""

    def __init__(self, requests: Seq[RunningRequest]) -> None:
        self._requests = requests
        self._equal: Floats = np.ones(len(requests), np.float32)
        self._known = self._equal
        self._steps = 0

    def of_step(self, others_wait: bool) -> Floats:
        """Return the urgency of each request in the next step."""
        if others_wait or len(self._requests) < 2:
            return self._equal
        if self._steps % INTERVAL == 0:
            left = np.array([request.steps_left for request in self._requests])
            urgency = np.maximum((left / max(left.mean(), 1.0)) ** POWER, MIN_URGENCY)
            self._known = (urgency / urgency.mean()).astype(np.float32)
        self._steps += 1
        return self._known
