"""Suffix matching: the places where the last tokens occurred before, in this request or in the draft store."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lookfar.core.arrays import Floats, Int32s, stack
from lookfar.drafters.base import (
    BatchDrafter,
    BatchOutcome,
    BatchProposal,
    DraftContext,
    Drafter,
    DrafterBatch,
    Outcome,
    Strategy,
)
from lookfar.errors import ConfigError
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.suffix_index import (
    IN_STORE,
    LENGTH,
    MAX_MATCH,
    QUERY,
    RANK,
    FollowedTexts,
    Matches,
    SuffixIndex,
)

# Match length → match score. Long matches differ little from each other.
SCORE_OF: Int32s = np.searchsorted(
    [1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32], np.arange(MAX_MATCH + 1), side="right"
).astype(np.int32)
RECENCY: Floats = (0.9 ** np.arange(128)).astype(np.float32)
PROMPT_TAIL = 64  # tokens of the prompt that are stored with an answer, so that the same question finds it
CHAINED_LENGTHS = (8, 4, 2, 1)
MIN_BRANCHES = 6  # and their length, however few rows a request of a batch gets


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
        text = SuffixIndex(context.max_length + 1, CHAINED_LENGTHS)
        first = max(len(context.prompt) - PROMPT_TAIL, 0) if context.remember else None
        return [SuffixDrafter(self, text, context.sources.store, first)]

    @property
    def max_rows(self) -> int:
        return self.rows


class SuffixDrafter(BatchDrafter):
    """Matches in the request's own text, prompt and output, and in the draft store, which gets the finished output.

    The newest of equally long matches weighs most.
    """

    name = "suffix"
    source_names = ("suffix", "store")
    wants_predictions = wants_steps = False

    def __init__(self, settings: Suffix, text: SuffixIndex, store: DraftStore, first: int | None) -> None:
        self.settings = settings
        self.text = text
        self.store = store
        self.first = first  # the first token of the text to store; None: the text is not stored

    @classmethod
    def together(cls, drafters: Seq[SuffixDrafter]) -> SuffixBatch:
        return SuffixBatch(drafters)

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if outcome.finished:
            self.remember(ids)

    def remember(self, ids: Seq[int]) -> None:
        """Add a finished text to the store, if it may be kept."""
        if self.first is not None:
            self.store.add(ids[self.first :])


class SuffixBatch(DrafterBatch):
    def __init__(self, drafters: Seq[SuffixDrafter]) -> None:
        self.drafters = drafters
        self.wanted: Int32s = np.array([(d.settings.branches, d.settings.length) for d in drafters], np.int32)
        members: dict[DraftStore, list[int]] = {}
        for i, drafter in enumerate(drafters):
            members.setdefault(drafter.store, []).append(i)
        self.stores = [(store, of, FollowedTexts([drafters[i].text for i in of])) for store, of in members.items()]

    def propose(self, texts: Seq[Seq[int]], limits: Int32s, rows: int) -> BatchProposal:
        wanted = np.minimum(self.wanted, max(rows, MIN_BRANCHES))
        np.minimum(wanted[:, 1], limits, out=wanted[:, 1])
        if len(self.stores) == 1:
            ((store, _, followed),) = self.stores
            return as_proposal(store.find_all(followed, texts, wanted))
        parts = []
        for store, of, followed in self.stores:
            found = store.find_all(followed, [texts[i] for i in of], wanted[of])
            found.about[QUERY] = np.array(of)[found.about[QUERY]]
            parts.append(found)
        about = np.concatenate([part.about for part in parts], 1)
        return as_proposal(Matches(stack([part.continuations for part in parts]), about))

    def observe(self, outcome: BatchOutcome) -> None:
        for drafter, ids, finished in zip(self.drafters, outcome.texts, outcome.finished, strict=True):
            if finished:
                drafter.remember(ids)


def as_proposal(found: Matches) -> BatchProposal:
    about = found.about
    return BatchProposal(
        found.continuations, SCORE_OF[about[LENGTH]], RECENCY[about[RANK]], about[QUERY], about[IN_STORE]
    )
