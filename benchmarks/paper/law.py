"""The scaling law of Lookahead Decoding: tokens per step by n-gram length and window."""

from __future__ import annotations

import numpy as np


def law(alpha: float, f: float, ngram: int, window: int) -> float:
    """Tokens per step by the paper's formula."""
    gamma = ngram - 1
    expected = (gamma + 1) - sum((1 - alpha**i) ** window for i in range(1, gamma + 1))
    return (f - 1 + expected) / f


def fit(points: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """α and f with the least squared error over (N, W, S), and that error's root mean."""
    best = (0.0, 1.0, np.inf)
    for alpha in np.arange(0.05, 0.95, 0.005):
        for f in np.arange(1.0, 12.0, 0.02):
            error = sum((law(alpha, f, n, w) - s) ** 2 for n, w, s in points) / len(points)
            if error < best[2]:
                best = float(alpha), float(f), float(error)
    return best[0], best[1], best[2] ** 0.5
