"""Suffix matching: the places where the last tokens occurred before, in this request or in the draft store."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lookfar.core.arrays import Floats, Int32s
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
from lookfar.retrieval.suffix_index import MAX_MATCH, FollowedTexts, Matches, SuffixIndex

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
        text = SuffixIndex(context.max_length + 1, CHAINED_LENGTHS)
        first = max(len(context.prompt) - PROMPT_TAIL, 0) if context.remember else None
        return [SuffixDrafter(self, text), StoreDrafter(self, text, context.sources.store, first)]

    @property
    def max_rows(self) -> int:
        return self.rows


class SuffixDrafter(BatchDrafter):
    """Matches in the request's own text, prompt and output. The newest of equally long matches weighs most."""

    name = "suffix"
    wants_predictions = wants_steps = False

    def __init__(self, settings: Suffix, text: SuffixIndex) -> None:
        self.settings = settings
        self.text = text

    @classmethod
    def together(cls, drafters: Seq[SuffixDrafter]) -> SuffixBatch:
        return SuffixBatch(drafters)

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass  # `propose` indexes the text from where it stopped


class SuffixBatch(DrafterBatch):
    def __init__(self, drafters: Seq[SuffixDrafter]) -> None:
        self.texts = FollowedTexts([drafter.text for drafter in drafters])
        self.wanted = wanted_by(drafters)

    def propose(self, texts: Seq[Seq[int]], limits: Int32s) -> BatchProposal:
        return as_proposal(self.texts.follow_and_find(texts, limited(self.wanted, limits)))


class StoreDrafter(BatchDrafter):
    """Matches in the draft store. A finished output is added to the store."""

    name = "store"
    wants_predictions = wants_steps = False

    def __init__(self, settings: Suffix, text: SuffixIndex, store: DraftStore, first: int | None) -> None:
        self.settings = settings
        self.text = text  # which `SuffixDrafter` keeps up to date
        self.store = store
        self.first = first  # the first token of the text to store; None: the text is not stored

    @classmethod
    def together(cls, drafters: Seq[StoreDrafter]) -> StoreBatch:
        return StoreBatch(drafters)

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if outcome.finished and self.first is not None:
            self.store.add(ids[self.first :])


class StoreBatch(DrafterBatch):
    def __init__(self, drafters: Seq[StoreDrafter]) -> None:
        self.drafters = drafters
        self.texts = FollowedTexts([drafter.text for drafter in drafters])
        self.wanted = wanted_by(drafters)
        self.members: dict[DraftStore, list[int]] = {}  # by store
        for i, drafter in enumerate(drafters):
            self.members.setdefault(drafter.store, []).append(i)

    def propose(self, texts: Seq[Seq[int]], limits: Int32s) -> BatchProposal:
        wanted = limited(self.wanted, limits)
        self.texts.follow(texts)
        found = []
        for store, members in self.members.items():
            if store.index.size:
                matches = store.find_all(self.texts.addresses[members], wanted[members])
                found.append(matches._replace(queries=np.array(members, np.int32)[matches.queries]))
        return as_proposal(Matches.together(found)) if found else BatchProposal()

    def observe(self, outcome: BatchOutcome) -> None:
        for drafter, ids, finished in zip(self.drafters, outcome.texts, outcome.finished, strict=True):
            if finished and drafter.first is not None:
                drafter.store.add(ids[drafter.first :])


def wanted_by(drafters: Seq[SuffixDrafter | StoreDrafter]) -> Int32s:
    """Return the most matches of each drafter and the tokens to copy from each, [drafters, 2]."""
    return np.array([(drafter.settings.branches, drafter.settings.length) for drafter in drafters], np.int32)


def limited(wanted: Int32s, limits: Int32s) -> Int32s:
    """Return what is wanted, with no more tokens than a request may emit."""
    wanted = wanted.copy()
    np.minimum(wanted[:, 1], limits, out=wanted[:, 1])
    return wanted


def as_proposal(found: Matches) -> BatchProposal:
    return BatchProposal(found.continuations, SCORE_OF[found.lengths], RECENCY[found.ranks], found.queries)
