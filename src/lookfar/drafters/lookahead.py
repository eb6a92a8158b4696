"""Lookahead Decoding (Fu et al. 2024): a Jacobi window whose trajectories become n-grams, and a pool of n-grams.

The window has N−1 levels. With the last token of the text at position p, level 0 holds tokens for p+1 … p+W−1 (the last
token is their column 0), and level ℓ ≥ 1 holds W tokens, column j at position p+ℓ+j. Column j read upwards is one
Jacobi trajectory: each level is what the model chose after the level below. The choices after the top level complete W
n-grams a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np

from lookfar.core.plan import WindowRows
from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.errors import ConfigError


@dataclass(frozen=True)
class Lookahead(Strategy):
    """Lookahead Decoding with window W, n-gram size N, and at most G n-grams verified at once.

    `from_prompt` also fills the pool with the n-grams of the prompt and of the text as it grows.
    """

    name: ClassVar[str] = "lookahead"
    uses_window: ClassVar[bool] = True
    window: int = 15
    ngram: int = 5
    guesses: int = 15
    from_prompt: bool = True

    def __post_init__(self) -> None:
        self._check_at_least(window=1, ngram=2, guesses=0)
        if not isinstance(self.from_prompt, bool):
            raise ConfigError(f"lookahead: from_prompt must be true or false, not {self.from_prompt!r}.")

    def create(self, context: DraftContext) -> list[Drafter]:
        return [LookaheadDrafter(self, context.prompt)]

    @property
    def max_rows(self) -> int:
        # Step t of the warm-up has t levels above the first; step N−2 is the full window.
        levels = range(self.ngram - 1)
        width = self.window + self.ngram - 2
        return max(width - t - 1 + t * (width - t) for t in levels) + self.guesses * (self.ngram - 1)


class NgramPool:
    """For each first token, the last G distinct continuations of N−1 tokens, most recent first."""

    def __init__(self, ngram: int, guesses: int) -> None:
        self.ngram = ngram
        self.guesses = guesses  # G
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
    """The window and the pool of one request."""

    name = Lookahead.name
    wants_predictions = False

    def __init__(self, settings: Lookahead, prompt: Seq[int]) -> None:
        self.settings = settings
        self.pool = NgramPool(settings.ngram, settings.guesses)
        if settings.from_prompt:
            self.pool.add_text(prompt, new=len(prompt))
        # Level 0 starts N−2 columns too wide; every warm-up step adds a level and drops a column.
        # The generator is seeded with the prompt's length, so that two runs of one prompt take the same steps.
        start = Random(len(prompt)).choices(prompt, k=settings.window + settings.ngram - 3)
        self.levels: list[list[int]] = [start]
        self.last_token = prompt[-1]

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        self.last_token = ids[-1]
        drafts = [ngram[:limit] for ngram in self.pool.after(self.last_token)]
        return Proposal.of(drafts, window=self.window_rows())

    def window_rows(self) -> WindowRows:
        """Return the window as rows: level 0 first, then the other levels, each from column to column."""
        below, *above = self.levels
        columns = len(below) + 1
        level = np.repeat(np.arange(len(self.levels)), [len(below)] + [columns] * len(above))
        column = np.concatenate([np.arange(1, columns), *[np.arange(columns)] * len(above)])
        # Level 0 up to the own column, then the own column only. The last token is seen by all.
        in_level_0 = (level == 0)[None] & (column[None] <= column[:, None])
        in_column = (level[None] > 0) & (level[None] <= level[:, None]) & (column[None] == column[:, None])
        return WindowRows(
            tokens=np.array([token for tokens in self.levels for token in tokens], dtype=np.int64),
            offsets=level + column,
            sees=in_level_0 | in_column,
            wanted=level == len(above),
        )

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if self.settings.from_prompt:
            self.pool.add_text(ids, new=len(outcome.emitted))
        if len(outcome.window_choices) != sum(map(len, self.levels)):
            return  # the window was left out of the step
        choices = self._top_choices(outcome)
        if len(self.levels) < self.settings.ngram - 1:  # warm-up
            self.levels = [tokens[1:] for tokens in [*self.levels, choices]]
        else:
            self._harvest(choices)
            _, *rest = [*self.levels, choices]
            self.levels = [rest[0][1:], *rest[1:]]

    def _top_choices(self, outcome: Outcome) -> list[int]:
        """Return the model's choices after the top level, one for each column."""
        top = len(self.levels[-1])
        choices = [int(choice) for choice in outcome.window_choices[len(outcome.window_choices) - top :]]
        return choices if len(self.levels) > 1 else [int(outcome.choices[0]), *choices]

    def _harvest(self, choices: list[int]) -> None:
        """Add the n-gram that each column completes to the pool."""
        first_tokens = [self.last_token, *self.levels[0]]
        for column, choice in enumerate(choices):
            trajectory = tuple(level[column] for level in self.levels[1:])
            self.pool.add(first_tokens[column], (*trajectory, choice))
