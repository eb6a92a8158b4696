"""Suffix matching: the places where the last tokens occurred before, in this request or in the draft store."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.errors import ConfigError
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.suffix_index import MAX_MATCH, SuffixIndex

# Match length → match score. Long matches differ little from each other.
SCORE_OF: Int32s = np.searchsorted(
    [1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32], np.arange(MAX_MATCH + 1), side="right"
).astype(np.int32)
RECENCY: Floats = (0.9 ** np.arange(128)).astype(np.float32)
PROMPT_TAIL = 64  # tokens of the prompt that are stored with an answer, so that the same question finds it
CHAINED_LENGTHS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Suffix(Strategy):
    """Longest suffix matches in this request and in the draft store.

    Up to `branches` places in each, `length` tokens copied from each, at most `rows` draft tokens a step.
    """

    name: ClassVar[str] = "suffix"
    branches: int = 16
    length: int = 24
    rows: int = 64

    def __post_init__(self) -> None:
        self._check_at_least(branches=1, length=1, rows=1)
        if self.branches > 64:
            raise ConfigError(f"suffix: branches must be at most 64, not {self.branches}.")

    def create(self, context: DraftContext) -> list[Drafter]:
        stored = StoreDrafter(self, context.sources.store, len(context.prompt), context.remember)
        return [SuffixDrafter(self, context.max_length + 1), stored]

    @property
    def max_rows(self) -> int:
        return self.rows


class SuffixDrafter:
    """Matches in the request's own text, prompt and output. The newest of equally long matches weighs most."""

    name = "suffix"
    wants_predictions = False

    def __init__(self, settings: Suffix, capacity: int) -> None:
        self.settings = settings
        self.index = SuffixIndex(capacity, CHAINED_LENGTHS)

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        new = ids[self.index.size :]
        depth = min(limit, self.settings.length)
        return as_proposal(*self.index.extend_and_find(new, self.settings.branches, depth))

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass  # `propose` indexes the text from where it stopped


class StoreDrafter:
    """Matches in the draft store. A finished output is added to the store."""

    name = "store"
    wants_predictions = False

    def __init__(self, settings: Suffix, store: DraftStore, prompt_length: int, remember: bool) -> None:
        self.settings = settings
        self.store = store
        self.first = max(prompt_length - PROMPT_TAIL, 0)
        self.remember = remember

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        if not self.store.index.size:
            return Proposal()
        tail = np.array(ids[-MAX_MATCH:], dtype=np.int32)
        return as_proposal(*self.store.find(tail, self.settings.branches, min(limit, self.settings.length)))

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if outcome.finished and self.remember:
            self.store.add(ids[self.first :])


def as_proposal(continuations: Int32s, matched: Int32s) -> Proposal:
    return Proposal(continuations, SCORE_OF[matched], RECENCY[: len(matched)])
