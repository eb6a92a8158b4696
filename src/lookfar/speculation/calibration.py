"""Calibration: how often draft tokens with an estimate were really accepted.

The estimates of the acceptance model rank candidates well, but along a path they multiply, and small errors with them:
high ones come out too high, low ones too low. The row budget compares gains with costs and needs them right. So what
was expected and what came is counted by the size of the estimate, and estimates are scaled by the ratio.
"""

from __future__ import annotations

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.jit import jit

BUCKETS = 28  # of the log-odds of an estimate, half a unit each, from -9 to 5
LOWEST, WIDTH = -9.0, 0.5
PRIOR = 2.0  # accepted tokens that the ratio of 1 is worth at the start
MEMORY = 60.0  # expected tokens after which older counts fade


class Calibration:
    """Ratios of accepted to expected draft tokens, by estimate."""

    def __init__(self) -> None:
        self.counts: Floats = np.full((2, BUCKETS), PRIOR, np.float32)  # expected, accepted

    def apply(self, scores: Floats) -> Floats:
        """Return the scaled estimates."""
        scaled: Floats = scale(self.counts, scores)
        return scaled

    def learn(self, scores: Floats, nodes: Int32s) -> None:
        """Count the estimates of verified nodes, given the accepted ones among them."""
        count(self.counts, scores, nodes)


@jit
def bucket_of(score):  # type: ignore[no-untyped-def]
    odds = np.log(max(score, 1e-6) / max(1.0 - score, 1e-6))
    return min(max(int((odds - LOWEST) / WIDTH), 0), BUCKETS - 1)


@jit
def scale(counts, scores):  # type: ignore[no-untyped-def]
    scaled = np.empty_like(scores)
    for i in range(len(scores)):
        bucket = bucket_of(scores[i])
        scaled[i] = min(scores[i] * counts[1, bucket] / counts[0, bucket], np.float32(0.999))
    return scaled


@jit
def count(counts, scores, nodes):  # type: ignore[no-untyped-def]
    for score in scores:
        counts[0, bucket_of(score)] += score
    for node in nodes:
        counts[1, bucket_of(scores[node])] += 1.0
    for bucket in range(BUCKETS):
        if counts[0, bucket] > MEMORY:
            counts[:, bucket] *= 0.5
