"""Suffix matching: the places where the last tokens occurred before, in this request or in the draft store."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lookfar.core.arrays import Floats, Int32s, stack
from lookfar.drafters.base import BatchDrafter, BatchOutcome, BatchProposal, DraftContext, Drafter, Outcome, Strategy
from lookfar.errors import ConfigError
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.suffix_index import MAX_MATCH, Matches, SuffixIndex

if TYPE_CHECKING:
    from typing_extensions import Self

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
    def propose_all(cls, drafters: Seq[Self], texts: Seq[Seq[int]], limits: Seq[int]) -> BatchProposal:
        indexes = [drafter.text for drafter in drafters]
        return as_proposal(SuffixIndex.follow_all(indexes, texts, wanted_by(drafters, limits)))

    @classmethod
    def observe_all(cls, drafters: Seq[Self], outcome: BatchOutcome) -> None:
        pass  # `propose_all` indexes the texts from where it stopped

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass


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
    def propose_all(cls, drafters: Seq[Self], texts: Seq[Seq[int]], limits: Seq[int]) -> BatchProposal:
        store = drafters[0].store
        if any(drafter.store is not store for drafter in drafters):
            return cls._propose_apart(drafters, texts, limits)
        if not store.index.size:
            return BatchProposal()
        for drafter, ids in zip(drafters, texts, strict=True):
            if drafter.text.size < len(ids):
                drafter.text.extend(ids[drafter.text.size :])
        addresses = np.array([drafter.text.address for drafter in drafters])
        return as_proposal(store.find_all(addresses, wanted_by(drafters, limits)))

    @classmethod
    def _propose_apart(cls, drafters: Seq[Self], texts: Seq[Seq[int]], limits: Seq[int]) -> BatchProposal:
        """Propose from the store of each drafter."""
        parts = [cls.propose_all([d], [ids], [n]) for d, ids, n in zip(drafters, texts, limits, strict=True)]
        owners = np.repeat(np.arange(len(parts)), [len(part.scores) for part in parts]).astype(np.int32)
        scores, weights = (np.concatenate([getattr(p, name) for p in parts]) for name in ("scores", "weights"))
        return BatchProposal(stack([part.drafts for part in parts]), scores, weights, owners)

    @classmethod
    def observe_all(cls, drafters: Seq[Self], outcome: BatchOutcome) -> None:
        for drafter, ids, finished in zip(drafters, outcome.texts, outcome.finished, strict=True):
            if finished:
                drafter._remember(ids)

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if outcome.finished:
            self._remember(ids)

    def _remember(self, ids: Seq[int]) -> None:
        if self.first is not None:
            self.store.add(ids[self.first :])


def wanted_by(drafters: Seq[SuffixDrafter | StoreDrafter], limits: Seq[int]) -> Int32s:
    """Return the most matches of each drafter and the tokens to copy from each."""
    wanted = [(d.settings.branches, min(n, d.settings.length)) for d, n in zip(drafters, limits, strict=True)]
    return np.array(wanted, np.int32)


def as_proposal(found: Matches) -> BatchProposal:
    return BatchProposal(found.continuations, SCORE_OF[found.lengths], RECENCY[found.ranks], found.queries)
