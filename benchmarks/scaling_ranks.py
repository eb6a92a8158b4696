"""A model of lookahead parallelism: the speed of 1 to 8 ranks from measured step costs and measured acceptance.

Every rank holds the whole model. A step of R ranks verifies a tree of 1 + R·d rows: each rank feeds the last token, its
own d draft rows, and the accepted tokens of the last step that another rank computed (all of them, in the worst case).
The slowest rank decides the time of a step; then come the exchange of tokens and the planning of the next tree, which
rank 0 does alone for all draft rows. Rows of a lookahead window need no planning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "paper"))
from law import law

RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
NGRAMS = range(3, 11)


def interpolated(points: Seq[tuple[float, float]], x: float) -> float:
    """Return the value between measured points, linear in the logarithm of x; flat beyond the last."""
    for (x1, y1), (x2, y2) in pairwise(points):
        if x <= x2:
            return y1 + (y2 - y1) * max(0.0, log2(x / x1)) / log2(x2 / x1)
    return points[-1][1]


@dataclass(frozen=True)
class Machine:
    """The measured costs of one rank, and the assumed cost of an exchange between ranks; all in milliseconds."""

    name: str
    steps: tuple[tuple[int, float], ...]  # rows → a step
    host: tuple[float, float]  # planning a step: in all cases, and for each row of the tree
    exchange: float

    @property
    def max_rows(self) -> int:
        return self.steps[-1][0]

    def step(self, ranks: int, rows_of_rank: float, rows: float) -> float:
        """Return the time of a step."""
        device = max(interpolated(self.steps, rows_of_rank), self.steps[0][1])
        return device + self.host[0] + self.host[1] * rows + (self.exchange if ranks > 1 else 0.0)

    @property
    def baseline(self) -> float:
        """The time of a token without speculation."""
        return self.step(1, 1, 1)


@dataclass(frozen=True)
class Choice:
    """The fastest setting for a number of ranks."""

    ranks: int
    speed_up: float  # over one rank without speculation
    tokens_per_step: float
    rows_of_rank: float
    rows: float  # planned: the last token and all drafts
    setting: str


def fastest(machine: Machine, ranks: int, settings: Iterator[tuple[float, float, float, str]]) -> Choice:
    """Choose among (tokens per step, rows of the slowest rank, planned rows, name); too many rows are left out."""
    best = Choice(ranks, 1.0, 1.0, 1, 1, "none")
    for tokens, rows_of_rank, rows, name in settings:
        if rows_of_rank > machine.max_rows:
            continue
        speed_up = tokens / machine.step(ranks, rows_of_rank, rows) * machine.baseline
        if speed_up > best.speed_up:
            best = Choice(ranks, speed_up, tokens, rows_of_rank, rows, name)
    return best


def replayed(ranks: int, tokens: float) -> float:
    """Return the rows of accepted tokens that a rank did not compute and feeds again."""
    return tokens - 1 if ranks > 1 else 0.0


def trees(machine: Machine, ranks: int, acceptance: Callable[[float], float]) -> Choice:
    """Choose the draft rows of each rank for `auto` trees."""

    def settings() -> Iterator[tuple[float, float, float, str]]:
        for drafts in range(1, machine.max_rows):
            rows = 1 + ranks * drafts
            tokens = acceptance(rows)
            yield tokens, 1 + replayed(ranks, tokens) + drafts, rows, f"{drafts} draft rows a rank"

    return fastest(machine, ranks, settings())


def windows(machine: Machine, ranks: int, alpha: float, f: float) -> Choice:
    """Choose N and W = G of pure Lookahead Decoding, with tokens per step by the paper's law.

    A rank has a slice of the window's columns. Its rows also see the first level up to the end of the slice, so the
    last rank feeds that level whole.
    """

    def settings() -> Iterator[tuple[float, float, float, str]]:
        for n in NGRAMS:
            for w in range(1, machine.max_rows):
                tokens = law(alpha, f, n, w)
                columns, guesses = ceil(w / ranks), ceil(w / ranks)
                of_rank = w + (n - 2) * columns + guesses * (n - 1) + replayed(ranks, tokens)
                yield tokens, of_rank, 1 + w * (n - 1), f"N {n}, W = G = {w}"

    return fastest(machine, ranks, settings())
