"""The longest suffix of the text that stood before, in this request or in the store, and how it went on there."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.arrays import Floats, Int32s
from lookfar.config import Suffix
from lookfar.drafters.base import Outcome, Proposal
from lookfar.index import LONGEST, TokenIndex
from lookfar.store import Store

# Match length → grade. Long matches differ little from each other.
GRADE_OF: Int32s = np.searchsorted([1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32], np.arange(LONGEST + 1), side="right").astype(
    np.int32
)
RECENCY: Floats = (0.9 ** np.arange(128)).astype(np.float32)
PROMPT_TAIL = 64  # tokens of the prompt that are stored with an answer, so that the same question finds it


class SuffixDrafter:
    """Matches in the request's own text, prompt and answer. The newest of equals counts most."""

    name = "suffix"
    wants_predictions = False

    def __init__(self, config: Suffix, capacity: int) -> None:
        self.config = config
        self.index = TokenIndex(capacity, (8, 4, 2, 1))

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        new = ids[self.index.size :]
        return as_proposal(*self.index.follow(new, self.config.branches, min(limit, self.config.length)))

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass  # `propose` reads on in the text where it left off


class StoreDrafter:
    """Matches in what earlier requests left and in what was learned. A finished answer joins the store."""

    name = "store"
    wants_predictions = False

    def __init__(self, config: Suffix, store: Store, prompt_length: int, remember: bool) -> None:
        self.config = config
        self.store = store
        self.first = max(prompt_length - PROMPT_TAIL, 0)
        self.remember = remember

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        if not self.store.index.size:
            return Proposal()
        tail = np.array(ids[-LONGEST:], dtype=np.int32)
        return as_proposal(*self.store.find(tail, self.config.branches, min(limit, self.config.length)))

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if outcome.finished and self.remember:
            self.store.add(ids[self.first :])


def as_proposal(continuations: Int32s, matched: Int32s) -> Proposal:
    return Proposal(continuations, GRADE_OF[matched], RECENCY[: len(matched)])
