"""The loop: plan, forward, verify, commit. Sequences take slots, advance unevenly and leave when they are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np

from lookfar.arrays import Ints
from lookfar.budget import CostCurve
from lookfar.cache import SlotCache
from lookfar.costs import keep_refined, step_costs
from lookfar.drafters.base import Outcome, Predictions
from lookfar.errors import CapacityError, ConfigError
from lookfar.memory import Memory
from lookfar.model import BoundModel
from lookfar.planner import plan_step
from lookfar.sequence import OnStep, OnTokens, Request, Sequence
from lookfar.successors import TOP
from lookfar.tree import Plan, SequencePlan
from lookfar.verify import Answers, Walk, verify

NO_CHOICES = np.zeros(0, np.int64)


class Engine:
    """Decodes requests on one model, up to `max_batch` at a time."""

    def __init__(
        self,
        model: BoundModel,
        max_batch: int = 8,
        max_length: int | None = None,
        prefill_rows: int = 512,
        memory: Memory | None = None,
        costs: CostCurve | None = None,
    ) -> None:
        for name, value in {"max_batch": max_batch, "max_length": max_length, "prefill_rows": prefill_rows}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
        self.model = model
        self.memory = memory or Memory(model.vocab_size)
        self.costs = costs  # measured when an automatic budget first asks for it
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

    def run(
        self, requests: Seq[Request], on_tokens: OnTokens | None = None, on_step: OnStep | None = None
    ) -> list[Sequence]:
        """Decode all requests; finished sequences come back in the order of the requests."""
        for request in requests:
            self.check(request)
        with self._lock:
            if self.costs is None and any(r.budget == "auto" and r.strategies for r in requests):
                self.costs = step_costs(self.model)
            self._reserve(requests)
            waiting = deque(enumerate(requests))
            finished: dict[int, Sequence] = {}
            try:
                while waiting or self.active:
                    while waiting and len(self.active) < self.cache.slots:
                        index, request = waiting.popleft()
                        self.active.append(Sequence(request, index, self.memory))
                    self.step(on_tokens, on_step)
                    finished |= {sequence.index: sequence for sequence in self._retire()}
            finally:
                self.active.clear()
                if self.costs is not None:
                    keep_refined(self.model, self.costs)
        return [finished[index] for index in range(len(requests))]

    def step(self, on_tokens: OnTokens | None = None, on_step: OnStep | None = None) -> None:
        """One forward: the next group of sequences advances by a piece of a prompt, or by one token or more."""
        began = perf_counter()
        group, first_slot = self._next_group()
        plan = plan_step(group, first_slot, self.prefill_rows, self.memory, self.costs)
        planned = perf_counter()
        logits = self.model.forward(plan, self.cache)
        top = TOP if any(sequence.wants_predictions for sequence in group) else 0
        walks, answers = verify(plan, group, logits, top)
        verified = perf_counter()
        starts = [sequence.cached for sequence in group]
        taken = [self._advance(plan, i, sequence, walks[i], answers) for i, sequence in enumerate(group)]
        ended = perf_counter()
        for i, sequence in enumerate(group):
            tokens, kept = taken[i]
            self.cache.commit(first_slot + i, starts[i], kept)
            sequence.stats.host_seconds += (planned - began + ended - verified) / len(group)
            if tokens and on_tokens is not None:
                on_tokens(sequence, tokens)
            if on_step is not None and walks[i] is not None:
                on_step(sequence, plan.sequences[i], tokens, perf_counter() - began)
        if self.costs is not None and all(len(rows.chain) == 1 for rows in plan.sequences):
            self.costs.refine(plan.batch * plan.width, perf_counter() - began)

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
        self, plan: Plan, place: int, sequence: Sequence, walk: Walk | None, answers: Answers
    ) -> tuple[list[int], Ints]:
        """Append what was emitted, count, and tell the drafters. Returns the new tokens and the rows to keep cached:
        the chain, and the accepted nodes up to a stop."""
        rows = plan.sequences[place]
        before = sequence.ids[sequence.cached - 1] if sequence.cached else -1
        taken = sequence.append(walk.tokens) if walk else []
        accepted = walk.nodes[: len(taken)] if walk else []
        kept = np.array([*range(len(rows.chain)), *map(rows.node_row, accepted)], dtype=np.int64)
        sequence.cached += len(kept)
        if walk is not None:
            sequence.stats.count_step(rows, accepted)
            if plan.guesses is not None:
                plan.guesses.learn(place, taken)
                self.memory.judge_riders(_brought_by_riders(sequence, rows, accepted))
        if sequence.drafters:
            self._tell(plan, place, sequence, before, taken, accepted, answers)
        return taken, kept

    def _tell(
        self,
        plan: Plan,
        place: int,
        sequence: Sequence,
        before: int,
        taken: list[int],
        accepted: list[int],
        answers: Answers,
    ) -> None:
        """Show a step to the sequence's drafters; a piece of a prompt only to those that want predictions."""
        rows, choices = plan.sequences[place], answers.choices[place]
        outcome = Outcome(
            emitted=taken,
            tree=rows.tree,
            choices=choices[rows.root_row : rows.node_row(len(rows.tree))],
            rider_choices=NO_CHOICES,
            predictions=_predictions(plan, place, before, answers) if sequence.wants_predictions else None,
            last=max(rows.learned, 1) - 1 + (accepted[-1] + 1 if accepted else 0),
            finished=sequence.finish_reason is not None,
        )
        for i, drafter in enumerate(sequence.drafters):
            if rows.complete or drafter.wants_predictions:
                riding = bool(rows.riders) and len(rows.riders[i]) > 0
                seen = replace(outcome, rider_choices=choices[rows.rider_rows(i)]) if riding else outcome
                drafter.observe(sequence.ids, seen)

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


def _brought_by_riders(sequence: Sequence, rows: SequencePlan, accepted: list[int]) -> int | None:
    """How many accepted tokens only a drafter with riders offered; None if no riders were fed."""
    riding = {sequence.drafters[i].name for i, riders in enumerate(rows.riders) if len(riders)}
    if not riding:
        return None
    return sum(bool(rows.tree.backers[node] == 1) and rows.tree.source(node) in riding for node in accepted)


def _predictions(plan: Plan, place: int, before: int, answers: Answers) -> Predictions | None:
    """The best next tokens after a sequence's rows, riders left out; `before` is the token before the first row."""
    rows = plan.sequences[place]
    first = len(rows.chain) - (max(rows.learned, 1) if rows.complete else rows.learned)
    last = rows.node_row(len(rows.tree))
    if answers.top_ids is None or answers.top_logits is None or first == last:
        return None
    tokens = plan.tokens[place, :last].astype(np.int32)
    behind = np.empty(last, np.int32)
    behind[0] = before
    behind[1 : len(rows.chain)] = tokens[: rows.root_row]
    behind[len(rows.chain) :] = tokens[rows.tree.parents + len(rows.chain)]
    # The rows lie side by side among the kept ones, unless another sequence wants rows between.
    where = np.searchsorted(plan.kept, (first, last - 1))
    at: Any = slice(where[0], where[1] + 1)
    if where[1] - where[0] != last - 1 - first:
        at = np.searchsorted(plan.kept, np.arange(first, last))
    return Predictions(behind[first:], tokens[first:], answers.top_ids[place, at], answers.top_logits[place, at])
