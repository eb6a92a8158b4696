"""The scheduler: admits requests, picks those of each step, and commits or retries them afterwards."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from time import perf_counter

from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.engine.batch import StepBatch
from lookfar.engine.last_output import last_output, own_error, step_output
from lookfar.engine.outputs import StepOutput
from lookfar.engine.prefix_reuse import PrefixReuse
from lookfar.engine.request import RequestState
from lookfar.engine.verify import Walk
from lookfar.errors import CapacityError
from lookfar.kvcache.base import KVCache, kv_of
from lookfar.runners.base import StepResult
from lookfar.speculation.interface import Walks


class Scheduler:
    """Admits requests in their order, picks the ones that share a step, and commits its outcome.

    Requests beyond `max_batch` wait. A paused request gives up its place in the KV cache and keeps a copy of its KV.
    """

    def __init__(self, cache: KVCache, max_batch: int, prefill_chunk: int) -> None:
        self.cache = cache
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[RequestState] = deque()
        self.reuse = PrefixReuse(cache)
        self.retrying: deque[RequestState] = deque()  # of a step that failed: they run one at a time
        self.running: dict[int, RequestState] = {}  # by handle in the KV cache
        self.paused: dict[int, RequestState] = {}  # by handle of the request
        self._ended: list[StepOutput] = []  # of requests that ended outside of a step
        self._decoding: list[RequestState] = []  # all that run, if each of them has but its last token to feed
        self._room = 0  # tokens by which a text may grow at the least before the KV cache is too small

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.retrying or self.running or self._ended)

    @property
    def is_idle(self) -> bool:
        """Whether no request is known at all."""
        return not (self.has_work or self.paused)

    @property
    def is_shared(self) -> bool:
        """Whether more than one request runs or waits."""
        return len(self.running) + len(self.waiting) + len(self.retrying) > 1

    def add(self, state: RequestState) -> None:
        self.waiting.append(state)

    def cancel(self, handle: int) -> None:
        """Forget a request; nothing happens if it has ended."""
        self.paused.pop(handle, None)
        self._take_waiting(handle)
        for state in [state for state in self.running.values() if state.handle == handle]:
            self._release(state)

    def pause(self, handle: int) -> None:
        """Take a request out of the KV cache, or out of the queue, until it is resumed."""
        for state in self._take_waiting(handle):
            self.paused[handle] = state
        for state in [state for state in self.running.values() if state.handle == handle]:
            state.swapped = self.cache.export_kv(state.kv, 0, state.num_cached).to_host()
            self._release(state)
            self.paused[handle] = state

    def resume(self, handle: int) -> None:
        """Let a paused request wait for a place."""
        if handle in self.paused:
            self._wait_first(self.paused.pop(handle))

    def _take_waiting(self, handle: int) -> list[RequestState]:
        """Remove a request from the queues; returns it, or nothing if it is not there."""
        taken = [state for queue in (self.waiting, self.retrying) for state in queue if state.handle == handle]
        for state in taken:
            (self.retrying if state.retried else self.waiting).remove(state)
        return taken

    def _wait_first(self, state: RequestState) -> None:
        """Put a request in front of its queue."""
        (self.retrying if state.retried else self.waiting).appendleft(state)

    def schedule(self, limits: RunnerLimits) -> StepBatch:
        """Admit waiting requests and pick the next step; it is empty if nothing can run."""
        started = perf_counter()
        self._admit()
        self._grow_cache()
        others_wait = bool(self.waiting or self.paused)
        if self._decoding:
            return StepBatch(self._decoding, [1] * len(self._decoding), started, others_wait, decodes=True)
        if first := self._first_pass():
            chunks = [len(state.request.prompt) - state.source_length for state in first]
            return StepBatch(first, chunks, started, is_first_pass=True)
        if not self.running:
            return StepBatch([], [], started, others_wait)
        order = [self.running[handle] for handle in self.cache.order]
        pending = [state.num_pending for state in order]
        if max(pending) == 1 and all(state.num_cached for state in order):
            return StepBatch(order, pending, started, others_wait, decodes=True)
        return StepBatch(*self._next_group(order, limits), started, others_wait)

    def _first_pass(self) -> list[RequestState]:
        """Return requests whose prompts transformers has to run, in one pass."""
        if all(state.num_cached for state in self.running.values()):
            return []
        waiting = [state for handle in self.cache.order if (state := self.running[handle]).needs_first_pass]
        return [state for state in waiting if _call_of(state) is _call_of(waiting[0])]

    def _admit(self) -> None:
        if not (self.waiting or self.retrying) or (len(self.running) >= self.max_batch and not self.retrying):
            return
        if self.retrying or any(state.retried for state in self.running.values()):
            if not self.running:
                self._make_room(self.retrying)
                if self.retrying:
                    self._start(self.retrying.popleft())
            return
        self._make_room(self.waiting)
        for state in list(self.waiting):
            if self.reuse.comes_soon(state, self.running.values()):
                continue
            if len(self.running) >= self.max_batch or not self.cache.has_room(state.reserved_positions):
                return
            self.waiting.remove(state)
            self._start(state)

    def _make_room(self, queue: deque[RequestState]) -> None:
        """Reserve KV cache for all requests of a queue, or for its first one; end that one if it cannot fit."""
        keep = bool(self.running) or any(state.request.kv.reuse for state in queue)
        length = max(state.reserved_positions for state in queue)
        try:
            slots = min(self.max_batch, len(self.running) + len(queue))
            self.cache.reserve(slots, length, most=self.max_batch, keep=keep)
            return
        except CapacityError:
            pass
        try:
            first = queue[0].reserved_positions
            self.cache.reserve(len(self.running) + 1, first, most=len(self.running) + 1, keep=keep)
        except Exception as error:
            if not self.running:  # otherwise it waits for their memory
                queue[0].fail(error)
                self._ended.append(last_output(queue.popleft()))

    def _grow_cache(self) -> None:
        """Make room for answers that have outgrown the KV cache; one that cannot grow ends with the error."""
        if self._decoding and self._room >= 0:
            return
        capacity, running = self.cache.capacity, self.running.values()
        self._room = min((capacity - state.num_positions for state in running), default=0)
        for state in [state for state in running if state.num_positions > capacity]:
            try:
                self.cache.reserve(len(self.running), state.reserved_positions, most=self.max_batch, keep=True)
            except Exception as error:
                state.fail(error)
                self._ended.append(last_output(state))
                self._release(state)

    def _start(self, state: RequestState) -> None:
        """Give a request its place in the KV cache, with what is cached already."""
        self._decoding = []
        state.start()
        request = state.request
        try:
            if state.swapped is not None or request.kv.past is not None:
                kv = state.swapped if state.swapped is not None else kv_of(request.kv.past)
                state.kv, _ = self.cache.allocate()
                self.running[state.kv] = state
                state.num_cached = self.cache.import_kv(state.kv, kv)
            else:
                self.reuse.allocate(state)
                self.running[state.kv] = state
        except BaseException as error:
            state.fail(error)
            self._ended.append(last_output(state))
            if state.kv in self.running:
                self._release(state)
            return
        if state.swapped is None and not state.stats.steps:
            state.stats.reused_tokens = state.num_cached
        state.swapped = None

    def _next_group(self, order: list[RequestState], limits: RunnerLimits) -> tuple[list[RequestState], list[int]]:
        """Pick neighbouring requests for one step, and how many pending tokens each of them may feed.

        All requests if all of them decode, or if nothing is padded: prefills then share `prefill_chunk` rows, or the
        rows that decoding leaves, in order. Otherwise only requests that prefill, as many as fit one padded block.
        """
        start = next((i for i, state in enumerate(order) if state.is_prefilling), None)
        if start is None:
            return order, [state.num_pending for state in order]
        if limits.recurrent:
            return self._equal_chunks(order[start:])
        flat = not limits.padded and all(state.embeds is None for state in order)
        room = self.prefill_chunk + len(order) if limits.rows is None else limits.rows
        if flat and room >= len(order):
            chunks, left = [], min(self.prefill_chunk - 1, room - len(order))
            for state in order:
                more = min(state.num_pending - 1, left)
                chunks.append(1 + more)
                left -= more
            return order, chunks
        end, widest = start, 0
        while end < len(order) and order[end].is_prefilling:
            widest = max(widest, min(order[end].num_pending, self.prefill_chunk))
            if end > start and widest * (end - start + 1) > self.prefill_chunk:
                break
            end += 1
        return order[start:end], [self.prefill_chunk] * (end - start)

    def _equal_chunks(self, order: list[RequestState]) -> tuple[list[RequestState], list[int]]:
        """Pick requests that prefill, from the first on, and the same number of tokens for each.

        Padding would enter a recurrent state. Each step ends the shortest prompt at the least, so there are no more
        steps than requests or full chunks.
        """
        group = list(takewhile(lambda state: state.is_prefilling, order))[: self.prefill_chunk]
        pending = [state.prompt_pending or state.num_pending for state in group]
        chunk = min(self.prefill_chunk // len(group), *pending)
        if chunk + 1 in pending and chunk > 1:  # a last chunk of one token would run the code for decoding
            group, chunk = group[:1], min(self.prefill_chunk, pending[0])
            chunk -= chunk + 1 == pending[0]
        return group, [chunk] * len(group)

    def commit(self, batch: StepBatch, plan: StepPlan, walks: Walks[Walk], result: StepResult) -> list[StepOutput]:
        """Keep the KV of accepted tokens, free the requests that ended, and return the outputs of the step."""
        for state, walk, pending, length in zip(batch.requests, walks, plan.num_pending, plan.lengths, strict=True):
            if state.error is not None:
                continue
            if walk is None:
                state.num_cached = self.cache.commit(state.kv, pending)
                continue
            state.stats.rows += length - pending + 1
            if state.replays and pending > 1:
                state.stats.replayed_rows += pending - 1
            accepted = [pending + node for node in walk.nodes] if walk.nodes else ()
            state.num_cached = self.cache.commit(state.kv, pending, accepted)
            state.replays = True
            if self.reuse.prefixes is not None and state.stats.steps == 1:  # requests that come meanwhile begin like it
                self.reuse.keep(state)
        self._room -= plan.width
        if not self._decoding and self.cache.keeps_accepted and len(batch) == len(self.running):
            self._decoding = batch.requests if all(state.num_pending == 1 for state in batch.requests) else []
        requests = batch.requests
        for state in reversed([state for state in requests if state.is_finished]):
            self._export(state)
            self._release(state)
        batch.seconds = perf_counter() - batch.started
        batch.host_seconds = batch.seconds - result.seconds - walks.sampling_seconds
        share = (batch.host_seconds + result.launch_seconds) / len(batch)
        for state in requests:
            state.stats.host_seconds += share
        outputs = []
        for place in [place for place, state in enumerate(requests) if state.every_step or state.is_finished]:
            state, walk = requests[place], walks[place]
            if walk is not None and state.error is None:
                outputs.append(step_output(state, walk.nodes, plan.requests[place], batch.seconds, share))
            elif state.error is not None:
                outputs.append(last_output(state))
        return outputs + self.take_ended()

    def _export(self, state: RequestState) -> None:
        """Copy the KV of a finished request, if its caller wants it."""
        if state.request.kv.export and state.error is None:
            # The caller's own cache still holds what came from it; the last token was never fed.
            end = len(state.ids) - state.source_length - 1
            state.exported = self.cache.export_kv(state.kv, state.stats.reused_tokens, end)

    def fail(self, batch: StepBatch, error: BaseException) -> list[StepOutput]:
        """End the requests of a step that failed before it wrote to the KV cache."""
        for state in reversed(batch.requests):
            state.fail(error if len(batch) == 1 else own_error(error))
            self._release(state)
        return [last_output(state) for state in batch.requests] + self.take_ended()

    def recover(self, batch: StepBatch, error: BaseException, retry: bool) -> list[StepOutput]:
        """Restart after a failed step, which leaves the KV cache inconsistent.

        The requests of the step are retried alone, from their tokens; a request that fails alone, or for which `retry`
        is not allowed, ends with the error. Other running requests start again from their tokens.
        """
        running = self._abandon()
        running += [state for state in batch.requests if state not in running]  # those that were released already
        for state in reversed(running):
            in_step = state in batch.requests
            if not state.is_finished and (not retry or (in_step and len(batch) == 1)):
                state.fail(error if len(running) == 1 else own_error(error))
            if state.is_finished:
                self._ended.append(last_output(state))
                continue
            if tokens := state.deliver():  # the step failed after they were accepted
                output = StepOutput(state.handle, state.index, state.stats.steps, tokens)
                stats = state.stats
                self._ended.append(output._replace(elapsed=stats.seconds, reused_tokens=stats.reused_tokens))
            state.retried = state.retried or in_step
            self._wait_first(state)
        return self.take_ended()

    def abort(self, error: BaseException) -> list[StepOutput]:
        """End all requests with an error."""
        states = [*self._abandon(), *self.retrying, *self.waiting, *self.paused.values()]
        for queue in (self.retrying, self.waiting, self.paused):
            queue.clear()
        for state in states:
            state.fail(own_error(error))
        return self.take_ended() + [last_output(state) for state in states]

    def end_all(self, error: BaseException) -> None:
        """End all requests with an error, which the next step returns."""
        self._ended = self.abort(error)

    def _abandon(self) -> list[RequestState]:
        """Take all running requests out of the KV cache, whose contents are lost, and return them in their order."""
        running = [self.running[handle] for handle in self.cache.order if handle in self.running]
        self.cache.abandon()
        self.running.clear()
        self._decoding = []
        for state in running:
            state.kv, state.num_cached, state.replays = -1, 0, False
        return running

    def take_ended(self) -> list[StepOutput]:
        """Return the last outputs of requests that ended outside of a step."""
        ended, self._ended = self._ended, []
        return ended

    def _release(self, state: RequestState) -> None:
        """Free the KV of a request; later requests may start from it if its tokens are known."""
        self._decoding = []
        self.reuse.free(state)
        del self.running[state.kv]
        state.kv = -1


def _call_of(state: RequestState) -> object:
    assert state.request.kv.first is not None
    return state.request.kv.first.call
