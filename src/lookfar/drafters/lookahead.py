"""Lookahead Decoding (Fu et al. 2024): a Jacobi window whose trajectories become n-grams, and a pool of them.

The window has N−1 levels. With the root at position p, level 0 holds the tokens guessed for p+1 … p+W−1 (the root
stands in front of them as column 0) and level ℓ ≥ 1 holds W tokens, column j at position p+ℓ+j. Column j read upwards
is one Jacobi trajectory: each level is what the model answered to the one below. The answers to the top level complete
W n-grams a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from random import Random

import numpy as np

from lookfar.config import Lookahead
from lookfar.drafters.base import Outcome, Proposal
from lookfar.tree import Riders


class NgramPool:
    """For each first token, the last G distinct continuations of N−1 tokens, most recent first."""

    def __init__(self, ngram: int, guesses: int) -> None:
        self.ngram = ngram
        self.guesses = guesses
        self._of: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, key: int, continuation: tuple[int, ...]) -> None:
        if not self.guesses:
            return
        entries = self._of.setdefault(key, OrderedDict())
        entries[continuation] = None
        entries.move_to_end(continuation)
        if len(entries) > self.guesses:
            entries.popitem(last=False)

    def add_text(self, ids: Seq[int], new: int) -> None:
        """Add the n-grams of a text that end in one of its last `new` tokens."""
        for end in range(max(self.ngram, len(ids) - new + 1), len(ids) + 1):
            self.add(ids[end - self.ngram], tuple(ids[end - self.ngram + 1 : end]))

    def after(self, key: int) -> list[tuple[int, ...]]:
        return list(reversed(self._of.get(key, ())))


class LookaheadDrafter:
    """The window and the pool of one sequence."""

    name = Lookahead.name
    wants_predictions = False

    def __init__(self, config: Lookahead, prompt: list[int]) -> None:
        self.config = config
        self.pool = NgramPool(config.ngram, config.guesses)
        if config.from_prompt:
            self.pool.add_text(prompt, new=len(prompt))
        # Level 0 starts N−2 columns too wide; every warm-up step adds a level and drops a column.
        # A generator of its own, seeded by nothing but the prompt: two runs of one prompt take the same steps.
        start = Random(len(prompt)).choices(prompt, k=config.window + config.ngram - 3)
        self.levels: list[list[int]] = [start]
        self.root = prompt[-1]

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        self.root = ids[-1]
        guesses = [guess[:limit] for guess in self.pool.after(self.root)]
        return Proposal.of(guesses, riders=self.window_rows())

    def window_rows(self) -> Riders:
        """The window as rider rows: level 0 first, then the other levels, each from column to column."""
        below, *above = self.levels
        columns = len(below) + 1
        level = np.repeat(np.arange(len(self.levels)), [len(below)] + [columns] * len(above))
        column = np.concatenate([np.arange(1, columns), *[np.arange(columns)] * len(above)])
        # Level 0 up to the own column, and the levels between in the own column. The root is seen by all.
        on_floor = (level == 0)[None] & (column[None] <= column[:, None])
        on_column = (level[None] > 0) & (level[None] <= level[:, None]) & (column[None] == column[:, None])
        return Riders(
            tokens=np.array([token for tokens in self.levels for token in tokens], dtype=np.int64),
            offsets=level + column,
            sees=on_floor | on_column,
            wanted=level == len(above),
        )

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if self.config.from_prompt:
            self.pool.add_text(ids, new=len(outcome.emitted))
        if len(outcome.rider_choices) != sum(map(len, self.levels)):
            return  # the window was not fed: other rows were worth more
        answers = self._top_answers(outcome)
        if len(self.levels) < self.config.ngram - 1:  # warm-up
            self.levels = [tokens[1:] for tokens in [*self.levels, answers]]
        else:
            self._harvest(answers)
            _, *rest = [*self.levels, answers]
            self.levels = [rest[0][1:], *rest[1:]]

    def _top_answers(self, outcome: Outcome) -> list[int]:
        """The model's answers to the top level, one a column."""
        top = len(self.levels[-1])
        answers = [int(answer) for answer in outcome.rider_choices[len(outcome.rider_choices) - top :]]
        return answers if len(self.levels) > 1 else [int(outcome.choices[0]), *answers]

    def _harvest(self, answers: list[int]) -> None:
        floor = [self.root, *self.levels[0]]
        for column, answer in enumerate(answers):
            trajectory = tuple(level[column] for level in self.levels[1:])
            self.pool.add(floor[column], (*trajectory, answer))
