"""The loop: plan, forward, verify, commit. Sequences take slots, advance unevenly and leave when they are done.

Every call puts its requests in line and steps the engine until they are done. A step advances whatever has a slot, so
calls that overlap (threads, streams read in turn) share their forwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np

from lookfar.answers import Answers, EagerSteps, Steps
from lookfar.budget import CostCurve
from lookfar.cache import SlotCache
from lookfar.choose import shared
from lookfar.costs import MEASURED_CELLS, keep_refined, step_costs
from lookfar.drafters.base import Outcome, Predictions
from lookfar.errors import CapacityError, ConfigError, LookfarError
from lookfar.memory import Memory
from lookfar.model import BoundModel
from lookfar.pace import Pace
from lookfar.planner import plan_step
from lookfar.sequence import OnStep, OnTokens, Progress, Request, Sequence
from lookfar.successors import SAMPLED_TOP, TOP
from lookfar.tree import Plan, SequencePlan, after_what
from lookfar.verify import Walk, verify

NO_CHOICES = np.zeros(0, np.int64)


@dataclass(eq=False)
class Call:
    """Requests that somebody waits for."""

    progress: deque[Progress] = field(default_factory=deque)  # not yet told
    unfinished: int = 0
    failed: bool = False


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
        steps: Steps | None = None,
    ) -> None:
        for name, value in {"max_batch": max_batch, "max_length": max_length, "prefill_rows": prefill_rows}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
        self.model = model
        self.steps = steps or EagerSteps(model)
        room = self.steps.room
        if room.fixed and room.rows is not None and max_batch > room.rows:
            raise ConfigError(f"max_batch must be at most {room.rows} with exact=True, not {max_batch}.")
        self.memory = memory or Memory(model.vocab_size)
        self.costs = costs  # measured when an automatic budget first asks for it
        self.max_batch = max_batch
        self.prefill_rows = prefill_rows
        limits = [limit for limit in (max_length, model.support.max_positions) if limit is not None]
        self.max_length = min(limits, default=None)
        self.cache = SlotCache(slots=0, capacity=0)
        self.active: list[Sequence] = []  # place in the list = slot
        self._callers: list[Call] = []  # of the active sequences
        self._waiting: deque[tuple[Call, int, Request]] = deque()
        self._left: dict[int, list[int]] = {}  # texts whose keys and values still lie in free slots
        self._later: list[Callable[[], None]] = []
        self._paces: dict[int, Pace] = {}  # by the number of sequences in a step, to the next power of two
        self._lock = Lock()

    def check(self, request: Request) -> None:
        """Refuse a request that cannot fit, before anything is decoded."""
        if self.max_length is not None and request.length > self.max_length:
            raise CapacityError(
                f"The prompt has {len(request.prompt)} tokens and max_new_tokens is {request.max_new_tokens}: "
                f"{request.length} do not fit in {self.max_length}, so shorten one of them"
                + (" or raise max_length." if self._limit_is_ours() else ", the longest text this model can position.")
            )

        most, riding = self.steps.room.rows, sum(s.max_rows for s in request.strategies if s.rides)
        if most is not None and riding >= most:
            raise ConfigError(
                f"A step has room for {most} rows here and the window of this strategy takes {riding + 1}: "
                "make it smaller."
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
        finished: dict[int, Sequence] = {}
        with closing(self.stream(requests)) as steps:
            for done in steps:
                if on_tokens is not None:
                    on_tokens(done.sequence, done.tokens)
                if on_step is not None:
                    on_step(done.sequence, done.rows, done.tokens, done.seconds)
                if done.sequence.finish_reason is not None:
                    finished[done.sequence.index] = done.sequence
        return [finished[index] for index in range(len(requests))]

    def stream(self, requests: Seq[Request]) -> Generator[Progress, None, None]:
        """Decode requests and tell of every step that gave one of them tokens. Closing it frees their slots."""
        for request in requests:
            self.check(request)
        call = Call(unfinished=len(requests))
        try:
            with self._lock:
                self._reserve(requests)
                if self.costs is None and any(r.budget == "auto" and r.strategies for r in requests):
                    self.costs = self._measured_costs()
                self._waiting.extend((call, index, request) for index, request in enumerate(requests))
            while call.unfinished or call.progress:
                while call.progress:
                    yield call.progress.popleft()
                with self._lock:
                    if call.failed:
                        raise LookfarError("A forward that this request shared with another one failed: ask again.")
                    if call.unfinished and not call.progress:
                        self._step_or_fail()
        finally:
            with self._lock:
                self._drop(call)
                self._catch_up()
                if self.costs is not None:
                    keep_refined(self.steps, self.costs)

    def _step_or_fail(self) -> None:
        """What a step leaves behind when it breaks off is in no known state, so nobody may go on from it."""
        try:
            self.step()
        except BaseException:
            for caller in self._callers:
                caller.failed = True
            self.active.clear()
            self._callers.clear()
            self._left.clear()
            self._later.clear()
            raise

    def step(self) -> None:
        """One forward: the next group of sequences advances by a piece of a prompt, or by one token or more."""
        began = perf_counter()
        while self._waiting and len(self.active) < self.cache.slots:
            self._admit(*self._waiting.popleft())
        group, first_slot, pieces = self._next_group()
        pace, reading = self._pace_of(group), any(sequence.uncached > 1 for sequence in group)
        guess = True
        if pace is not None:
            guess = pace.guessing if reading else pace.guess_next(self._plain_rate(group))
        overhead = pace.overhead if pace is not None else 0.0
        plan = plan_step(group, first_slot, pieces, self.memory, self.costs, self.steps.room, guess, overhead)
        planned = perf_counter()
        sampled = any(sequence.request.draws is not None for sequence in group)
        learning = (guess or reading) and any(sequence.wants_predictions for sequence in group)
        top = (SAMPLED_TOP if sampled else TOP) if learning else 0
        answered = self.steps.start(plan, self.cache, group, top)
        self._catch_up()
        for sequence in group:
            if guess and sequence.request.draws is not None:
                sequence.request.draws.prepare()
        answers = answered()
        arrived = perf_counter()
        walks = verify(plan, group, answers)
        # Processors and draws that the host has to call for are the model's work, not ours.
        chosen = arrived if answers.drawn or all(sequence.plain for sequence in group) else perf_counter()
        starts = [sequence.cached for sequence in group]
        kept = [self._advance(plan, i, sequence, walks[i], answers, guess) for i, sequence in enumerate(group)]
        host = planned - began + perf_counter() - chosen
        for i, (sequence, walk) in enumerate(zip(group, walks, strict=True)):
            self.cache.commit(first_slot + i, starts[i], kept[i])
            sequence.stats.host_seconds += (host + self.steps.launching) / len(group)
            if walk is not None:
                done = Progress(sequence, plan.sequences[i], walk.tokens, walk.nodes, perf_counter() - began)
                self._callers[first_slot + i].progress.append(done)
        self._retire()
        if self.steps.first_of_its_kind:
            return  # something was compiled or captured, so its time says nothing
        if self.costs is not None and all(len(rows.chain) == 1 for rows in plan.sequences):
            self._later.append(partial(self.costs.refine, self.steps.fed(plan), arrived - planned))
        if pace is not None and not reading:
            pace.learn(guess, sum(len(walk.tokens) for walk in walks if walk), perf_counter() - began, host)

    def _pace_of(self, group: list[Sequence]) -> Pace | None:
        """Whether to guess is asked where the budget is automatic, and learned from steps that read no prompt."""
        if self.costs is None or not all(sequence.request.budget == "auto" for sequence in group):
            return None
        size = 1 << (len(group) - 1).bit_length()
        if size not in self._paces:
            self._paces[size] = Pace(size)
        return self._paces[size]

    def _plain_rate(self, group: list[Sequence]) -> float:
        assert self.costs is not None
        return len(group) / float(self.costs.table(len(group))[len(group)] * self.costs.drift)

    def _admit(self, call: Call, index: int, request: Request) -> None:
        """Give a request the next slot, with the keys and values that are already known."""
        slot = len(self.active)
        sequence = Sequence(request, index, self.memory)
        if request.past is not None:
            sequence.cached = self.cache.load(slot, request.past)
        elif request.reuse and self._left:
            source, known = max(
                ((left, shared(text, request.prompt)) for left, text in self._left.items()), key=lambda found: found[1]
            )
            sequence.cached = min(known, len(request.prompt) - 1)  # the last token's logits are needed
            if source != slot:
                self.cache.copy(source, slot, sequence.cached)
        sequence.stats.reused_tokens = sequence.cached
        self._left.pop(slot, None)
        self.active.append(sequence)
        self._callers.append(call)

    def _next_group(self) -> tuple[list[Sequence], int, list[int]]:
        """Neighbouring slots for one forward, and how many known tokens each of them may feed.

        All, if they decode or if nothing is padded: prompts then share `prefill_rows`, or what decoding leaves of a
        step's room, the first one first. Otherwise some that read prompts, as many as make one padded block of rows.
        """
        start = next((i for i, sequence in enumerate(self.active) if sequence.uncached > 1), None)
        if start is None:
            return self.active, 0, [1] * len(self.active)
        room = self.steps.room
        packed = room.packed and all(sequence.request.embeds is None for sequence in self.active)
        if (
            packed
            and not room.fixed
            and room.rows is not None
            and room.rows >= max(self.prefill_rows, len(self.active))
        ):
            pieces, left = [], min(self.prefill_rows - 1, room.rows - len(self.active))
            for sequence in self.active:
                more = min(sequence.uncached - 1, left)
                pieces.append(1 + more)
                left -= more
            return self.active, 0, pieces
        end, widest = start, 0
        while end < len(self.active) and self.active[end].uncached > 1:
            widest = max(widest, min(self.active[end].uncached, self.prefill_rows))
            if end > start and room.fixed:
                break  # what else is read beside a prompt would change the last bits of its keys and values
            if end > start and widest * (end - start + 1) > self.prefill_rows:
                break
            end += 1
        return self.active[start:end], start, [self.prefill_rows] * (end - start)

    def _advance(
        self, plan: Plan, place: int, sequence: Sequence, walk: Walk | None, answers: Answers, guess: bool
    ) -> list[int]:
        """Append what was emitted, count, and tell the drafters. Returns the rows to keep cached: the chain, and the
        accepted nodes."""
        rows = plan.sequences[place]
        before = sequence.ids[sequence.cached - 1] if sequence.cached else -1
        tokens, accepted = (walk.tokens, walk.nodes) if walk is not None else ([], [])
        chain = len(rows.chain)
        kept = [*range(chain), *(chain + node for node in accepted)]
        sequence.cached += len(kept)
        if walk is not None:
            sequence.append(tokens, walk.finish_reason)
            sequence.stats.rows += len(rows) - rows.root_row
            self._later.append(partial(self._learn, plan, place, sequence, walk))
            if walk.finish_reason is not None:
                self._catch_up()  # its statistics are read now
        reading = chain > 1 or not rows.complete
        if sequence.drafters and (guess or reading or sequence.finish_reason is not None):
            self._tell(plan, place, sequence, before, tokens, accepted, answers)
        return kept

    def _learn(self, plan: Plan, place: int, sequence: Sequence, walk: Walk) -> None:
        """Count and judge a step's guesses. The next step does not wait for it."""
        sequence.stats.count_guesses(plan.sequences[place].tree, walk.nodes)
        if plan.guesses is not None:
            plan.guesses.learn(place, walk.tokens)
            self.memory.judge_riders(_brought_by_riders(sequence, plan.sequences[place], walk.nodes))

    def _catch_up(self) -> None:
        """Do what the last step left for the time in which the device works."""
        later, self._later = self._later, []
        for job in later:
            job()

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

    def _retire(self) -> None:
        """Free the slots of finished sequences."""
        for slot in reversed(range(len(self.active))):
            sequence = self.active[slot]
            if sequence.finish_reason is not None:
                if sequence.request.export:
                    # What came from the caller's own cache is still there; the last token was never fed.
                    sequence.exported = self.cache.take(slot, sequence.stats.reused_tokens, len(sequence.ids) - 1)
                self._callers[slot].unfinished -= 1
                self._free(slot)

    def _drop(self, call: Call) -> None:
        """Forget the requests of a call that nobody waits for any more."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not call)
        for slot in reversed(range(len(self.active))):
            if self._callers[slot] is call:
                self._free(slot)

    def _free(self, slot: int) -> None:
        """Free a slot; the last active sequence moves into the gap."""
        left = self.active[slot]
        last, caller = self.active.pop(), self._callers.pop()
        if slot < len(self.active):
            self.cache.move(len(self.active), slot, last.cached)
            self.active[slot], self._callers[slot] = last, caller
        elif left.request.embeds is None:
            self._left[slot] = left.ids[: left.cached]

    def _reserve(self, requests: Seq[Request]) -> None:
        """Make sure the cache holds these requests; buffers that are large enough are used again."""
        slots = min(self.max_batch, len(self.active) + len(self._waiting) + len(requests))
        longest = max(request.length + request.extra_rows for request in requests)
        if slots <= self.cache.slots and longest <= self.cache.capacity:
            return
        keep = bool(self.active or self._waiting) or any(request.reuse for request in requests)
        if not keep:
            self.cache.clear()  # its memory is free for the next one
            self.cache = SlotCache(slots=0, capacity=0)
            self._left.clear()
        slots, longest = self.steps.cache_size(
            max(slots, self.cache.slots), max(longest, self.cache.capacity), self.max_batch
        )
        self.cache = self.cache.grown(slots, longest)

    def _measured_costs(self) -> CostCurve:
        """Captured steps belong to a cache, so they are measured on ours, unless somebody is using it."""
        idle = not self.active and self.cache.capacity >= MEASURED_CELLS
        if idle:
            self._left.clear()
        return step_costs(self.steps, self.cache if idle else None)

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
    tokens, behind = after_what(rows.chain, rows.tree.tokens, rows.tree.parents, before)
    everything = len(answers.kept) == plan.width
    at: Any = slice(first, last) if everything else np.searchsorted(answers.kept, np.arange(first, last))
    return Predictions(behind[first:], tokens[first:], answers.top_ids[place][at], answers.top_logits[place][at])
