"""The loop: plan, forward, verify, commit. Sequences take slots, advance unevenly and leave when they are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from threading import Lock

import numpy as np

from lookfar.cache import SlotCache
from lookfar.drafters.base import Outcome
from lookfar.errors import CapacityError, ConfigError
from lookfar.model import BoundModel
from lookfar.planner import plan_step
from lookfar.sequence import OnTokens, Request, Sequence
from lookfar.tree import Ints, SequencePlan
from lookfar.verify import Walk, verify


class Engine:
    """Decodes requests on one model, up to `max_batch` at a time."""

    def __init__(
        self, model: BoundModel, max_batch: int = 8, max_length: int | None = None, prefill_rows: int = 512
    ) -> None:
        for name, value in {"max_batch": max_batch, "max_length": max_length, "prefill_rows": prefill_rows}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
        self.model = model
        self.max_batch = max_batch
        self.prefill_rows = prefill_rows
        limits = [limit for limit in (max_length, model.support.max_positions) if limit is not None]
        self.max_length = min(limits, default=None)
        self.cache = SlotCache(slots=0, capacity=0)
        self.active: list[Sequence] = []  # place in the list = slot
        self._lock = Lock()

    def check(self, request: Request) -> None:
        """Refuse a request that cannot fit, before anything is decoded."""
        if self.max_length is not None and request.length > self.max_length:
            raise CapacityError(
                f"The prompt has {len(request.prompt)} tokens and max_new_tokens is {request.max_new_tokens}: "
                f"{request.length} do not fit in {self.max_length}, so shorten one of them"
                + (" or raise max_length." if self._limit_is_ours() else ", the longest text this model can position.")
            )

    def can_draft(self, request: Request) -> bool:
        """Are guesses for this request verified exactly by this model? What cannot be drafted, transformers decodes."""
        support = self.model.support
        within = support.tree_limit is None or request.length + request.extra_rows <= support.tree_limit
        return support.trees and within

    def run(self, requests: Seq[Request], on_tokens: OnTokens | None = None) -> list[Sequence]:
        """Decode all requests; finished sequences come back in the order of the requests."""
        for request in requests:
            self.check(request)
        with self._lock:
            self._reserve(requests)
            waiting = deque(enumerate(requests))
            finished: dict[int, Sequence] = {}
            try:
                while waiting or self.active:
                    while waiting and len(self.active) < self.cache.slots:
                        index, request = waiting.popleft()
                        self.active.append(Sequence(request, index))
                    self.step(on_tokens)
                    finished |= {sequence.index: sequence for sequence in self._retire()}
            finally:
                self.active.clear()
        return [finished[index] for index in range(len(requests))]

    def step(self, on_tokens: OnTokens | None = None) -> None:
        """One forward: the next group of sequences advances by a piece of a prompt, or by one token or more."""
        group, first_slot = self._next_group()
        plan = plan_step(group, first_slot, self.prefill_rows)
        logits = self.model.forward(plan, self.cache)
        walks, choices = verify(plan, group, logits)
        for i, sequence in enumerate(group):
            start, rows = sequence.cached, plan.sequences[i]
            taken, kept = self._advance(sequence, rows, walks[i], choices[i])
            self.cache.commit(first_slot + i, start, kept)
            if taken and on_tokens is not None:
                on_tokens(sequence, taken)

    def _next_group(self) -> tuple[list[Sequence], int]:
        """Neighbouring slots for one forward: prompts first, as many as make one padded block of rows; else all."""
        start = next((i for i, sequence in enumerate(self.active) if sequence.uncached > 1), None)
        if start is None:
            return self.active, 0
        end, widest = start, 0
        while end < len(self.active) and self.active[end].uncached > 1:
            widest = max(widest, min(self.active[end].uncached, self.prefill_rows))
            if end > start and widest * (end - start + 1) > self.prefill_rows:
                break
            end += 1
        return self.active[start:end], start

    def _advance(
        self, sequence: Sequence, rows: SequencePlan, walk: Walk | None, choices: Ints
    ) -> tuple[list[int], Ints]:
        """Append what was emitted, count, and tell the drafters. Returns the new tokens and the rows to keep cached:
        the chain, and the accepted nodes up to a stop."""
        taken = sequence.append(walk.tokens) if walk else []
        accepted = walk.nodes[: len(taken)] if walk else []
        kept = np.array([*range(len(rows.chain)), *map(rows.node_row, accepted)], dtype=np.int64)
        sequence.cached += len(kept)
        if walk is None:
            return taken, kept
        stats = sequence.stats
        stats.rows += len(rows) - rows.root_row
        for source in rows.tree.sources:
            stats.drafter(source).proposed += 1
        for node in accepted:
            stats.drafter(rows.tree.sources[node]).accepted += 1
        if sequence.finish_reason is None:
            nodes = choices[rows.root_row : rows.node_row(len(rows.tree))]
            for i, drafter in enumerate(sequence.drafters):
                drafter.observe(sequence.ids, Outcome(taken, rows.tree, nodes, choices[rows.rider_rows(i)]))
        return taken, kept

    def _retire(self) -> list[Sequence]:
        """Free the slots of finished sequences; the last active sequence moves into each gap."""
        done = []
        for slot in reversed(range(len(self.active))):
            if self.active[slot].finish_reason is None:
                continue
            done.append(self.active[slot])
            last = self.active.pop()
            if slot < len(self.active):
                self.cache.move(len(self.active), slot, last.cached)
                self.active[slot] = last
        return done

    def _reserve(self, requests: Seq[Request]) -> None:
        """Make sure the cache holds these requests; buffers that are large enough are used again."""
        slots = min(self.max_batch, len(requests))
        longest = max(request.length + request.extra_rows for request in requests)
        if slots > self.cache.slots or longest > self.cache.capacity:
            self.cache = SlotCache(slots, capacity=-(-longest // 64) * 64)

    def _limit_is_ours(self) -> bool:
        return self.max_length != self.model.support.max_positions
