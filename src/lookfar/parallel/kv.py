"""The KV cache of rank 0, whose operations every rank repeats on a cache of its own.

A rank that did not compute an accepted path has fewer tokens cached than others. Rank 0 counts them for every rank. To
the engine, the tokens that all ranks have are cached, so it plans the others as pending tokens; each rank is fed those
that it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count
from weakref import finalize

import numpy as np

from lookfar.core.arrays import Ints
from lookfar.core.plan import StepPlan
from lookfar.errors import CapacityError, RankError
from lookfar.kvcache.base import KVHandle, KVState
from lookfar.kvcache.slots import Sizing, SlotKVCache, exact_size
from lookfar.parallel.followers import Followers
from lookfar.parallel.messages import Op
from lookfar.parallel.split import RankShare, longest_held

_ids = count()


class MirroredKVCache(SlotKVCache):
    """Rank 0's slots, and how many tokens of each request every rank has cached.

    KV never travels: a request that would start from a copy of its KV is fed its tokens again.
    """

    keeps_accepted = False  # not on every rank
    shares_prefixes = False

    def __init__(self, followers: Followers, sizing: Sizing = exact_size) -> None:
        super().__init__(sizing=sizing)
        self.id = next(_ids)
        self._followers = followers
        self._cached: dict[KVHandle, list[int]] = {}  # tokens of a request, by rank
        self._room: tuple[int, int] | None = None  # the slots and positions that all other ranks have
        self._shares: Seq[RankShare] = ()  # of the last step
        self._places: dict[KVHandle, int] = {}  # of its requests
        finalize(self, followers.post, Op.DROP, self.id)

    @property
    def slots(self) -> int:
        return self.buffers.slots if self._room is None else min(self.buffers.slots, self._room[0])

    @property
    def capacity(self) -> int:
        return self.buffers.capacity if self._room is None else min(self.buffers.capacity, self._room[1])

    def reserve(self, requests: int, length: int, *, most: int, keep: bool) -> None:
        if requests <= self.slots and length <= self.capacity:
            return
        self._followers.post(Op.RESERVE, self.id, [requests, length, most, keep])
        failure: Exception | None = None
        try:
            super().reserve(requests, length, most=most, keep=keep)
        except Exception as error:  # the others answer all the same
            failure = error
        slots, capacity = np.array(self._followers.ask()).min(0).tolist()
        self._room = slots, capacity
        if failure is not None or requests > slots or length > capacity:
            raise failure or CapacityError(
                f"Another rank has no memory for the KV cache of {requests} requests of {length} tokens: "
                "lower max_batch, max_length or max_new_tokens."
            )

    def clear(self) -> None:
        self._followers.post(Op.CLEAR, self.id)
        self._room = None
        super().clear()

    def forget(self) -> None:
        self._followers.post(Op.FORGET, self.id)
        super().forget()

    def allocate(self, prompt: Seq[int] = ()) -> tuple[KVHandle, int]:
        handle, reused = super().allocate(prompt)
        self._followers.post(Op.ALLOCATE, self.id, [handle, *prompt])
        others = [0] * len(self._followers.group.others)
        if prompt:  # freed slots may hold less of it elsewhere
            try:
                others = [int(answer[0]) for answer in self._followers.ask()]
            except BaseException:
                self._followers.post(Op.FREE, self.id, [handle])
                super().free(handle)
                raise
        self._cached[handle] = [reused, *others]
        return handle, min(self._cached[handle])

    def fit(self, plan: StepPlan) -> Ints:
        """Return how many tokens every rank has cached, [ranks, batch], so that each lacks one of a plan at least."""
        for rows in plan.requests:
            cached, most = self._cached[rows.kv], rows.num_cached + len(rows.pending) - 1
            for rank, own in enumerate(cached):
                if own > most:  # it is ahead of a chunk of a long replay
                    cached[rank] = most
                    if rank:
                        self._followers.post_to(rank, Op.TRUNCATE, self.id, [rows.kv, most])
                    else:
                        self.truncate(rows.kv, most)
        found: Ints = np.array([self._cached[rows.kv] for rows in plan.requests]).T
        return found

    def use(self, shares: Seq[RankShare]) -> None:
        """Note the shares of a step, to commit its rows."""
        self._shares = shares
        self._places = {rows.kv: place for place, rows in enumerate(shares[0].plan.requests)}

    def commit(self, handle: KVHandle, first: int, others: Seq[int] = ()) -> int:
        """Keep rows of the whole step on the ranks that have computed them; return what all ranks have cached.

        A rank keeps an accepted path up to the first row that it has not computed.
        """
        place, cached = self._places[handle], self._cached[handle]
        for rank, share in enumerate(self._shares):
            pending = len(share.plan.requests[place].pending)
            kept = longest_held(share.rows[place], others) if others else []
            if rank:
                self._followers.post_to(rank, Op.COMMIT, self.id, [handle, pending, *kept])
            else:
                super().commit(handle, pending, kept)
            cached[rank] += pending + len(kept)
        return min(cached)

    def fork(self, handle: KVHandle, length: int) -> KVHandle:
        raise NotImplementedError("Requests are not forked over ranks.")

    def free(self, handle: KVHandle, tokens: Seq[int] = ()) -> None:
        self._followers.post(Op.FREE, self.id, [handle, *tokens])
        del self._cached[handle]
        super().free(handle, tokens)

    def abandon(self) -> None:
        self._followers.post(Op.ABANDON, self.id)
        self._cached.clear()
        super().abandon()

    def export_kv(self, handle: KVHandle, start: int, end: int) -> KVState:
        return KVState([], 0)

    def write_kv(self, handle: KVHandle, state: KVState) -> int:
        raise RankError("KV that was computed elsewhere cannot be given to several ranks: run without torchrun.")

    def import_kv(self, handle: KVHandle, state: KVState) -> int:
        return 0
