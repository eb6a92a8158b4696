"""The draft sources that all requests of one model share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.prior import RecyclePrior
from lookfar.retrieval.recycle_table import RecycleTable

PAIRS = 1 << 16  # of the recycle table that all requests share
PRIVATE_PAIRS = 1 << 12


class DraftSources:
    """The draft store, the recycle table, and any objects that drafters make once for all requests."""

    def __init__(self, vocab_size: int, store: DraftStore | None = None) -> None:
        self.vocab_size = vocab_size
        self.store = store or DraftStore(vocab_size)
        self._recycle_table: RecycleTable | None = None
        self._prior: RecyclePrior | None = None
        self._known = 0  # tokens of the prior that the table has
        self._shared: dict[Hashable, Any] = {}

    @property
    def recycle_table(self) -> RecycleTable:
        """Created on first use, because it takes memory for every token of the vocabulary."""
        if self._recycle_table is None:
            self._recycle_table = self._new_table(PAIRS, lasting=True)
        return self._recycle_table

    @property
    def has_table(self) -> bool:
        """Whether the recycle table was used."""
        return self._recycle_table is not None

    def prepare(self) -> None:
        """Make the recycle table now: it takes tens of milliseconds, which the first request would wait for."""
        self._recycle_table = self.recycle_table

    def follow(self, other: DraftSources) -> None:
        """Be as ready as other sources, whose place these take: with their prior, and a table if they have one."""
        if other._prior is not None:
            self.use_prior(other._prior)
        if other.has_table:
            self.prepare()

    def private_table(self) -> RecycleTable:
        """Return a recycle table for one request that leaves nothing behind."""
        return self._new_table(PRIVATE_PAIRS)

    def _new_table(self, pairs: int, lasting: bool = False) -> RecycleTable:
        table = RecycleTable(self.vocab_size, pairs, lasting)
        if self._prior is not None:
            self._prior.fill(table)
        return table

    def use_prior(self, prior: RecyclePrior) -> None:
        """Let tables start with a prior; the one that is in use gets what it does not have yet."""
        if prior is not self._prior:
            self._prior, self._known = prior, 0
        if prior.count > self._known and self._recycle_table is not None:
            prior.fill(self._recycle_table, self._known)
        self._known = prior.count

    def shared(self, key: Hashable, create: Callable[[], Any]) -> Any:
        """Return the object that was created for `key`, creating it on first use."""
        if key not in self._shared:
            self._shared[key] = create()
        return self._shared[key]
