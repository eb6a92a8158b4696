"""The service: jobs of many clients on one LM. What is between the HTTP endpoints and the driver's thread."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TypeVar

from lookfar.engine.outputs import StepOutput
from lookfar.engine.thread_pool import release_thread_pool
from lookfar.errors import ConstraintError
from lookfar.lm import LM
from lookfar.server.admission import Admission
from lookfar.server.config import ServerConfig
from lookfar.server.errors import ApiError, as_api_error
from lookfar.server.jobs import Job, PreparedRequest, prepare
from lookfar.server.metrics import Metrics
from lookfar.server.namespaces import Namespaces
from lookfar.server.sources import Source, open_sources
from lookfar.server.wakeups import Wakeups
from lookfar.sharing.share import Share

PREPARING_THREADS = 2  # for templates, tokenizers and grammars
Result = TypeVar("Result")


class Service:
    """Answers jobs on an LM: admission, deadlines, cancellation, draft states of tenants, counts.

    Used on one event loop. `start` and `close` frame its life.
    """

    def __init__(self, lm: LM, config: ServerConfig | None = None) -> None:
        self.lm = lm
        self.config = config or ServerConfig()
        if lm.engine.scheduler.reuse.prefixes is None:
            lm.engine.share_prefixes(self.config.prefix_bytes)
        self.admission = Admission(lm.engine.config.max_batch, self.config.max_queue)
        self.metrics = Metrics()
        self.share = Share(self.config.share) if self.config.share else None
        self.namespaces = Namespaces(lm, self.config.store, self.share)
        self.is_draining = False
        self.open: set[Generation] = set()
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="lookfar-prepare")
        self._wakeups: Wakeups | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to serve on the running event loop.

        What the process has made so far will stay. A full garbage collection would look at all of it, half a million
        objects, and stop every stream for a quarter of a second, so the collector leaves it out until `close`.
        """
        gc.collect()
        gc.freeze()
        self._wakeups = Wakeups(asyncio.get_running_loop(), self.config.stream_interval)
        self._tasks = [asyncio.create_task(self._save_at_intervals())]

    def drain(self) -> None:
        """Refuse new jobs from now on; the present ones go on."""
        self.is_draining = True

    def end_all(self) -> None:
        """Answer all jobs that wait or run with an error."""
        self.admission.refuse_all(_shutting_down())
        for generation in list(self.open):
            generation.close()

    async def close(self) -> None:
        """Cancel what is still running, save the draft store, and stop the driver's thread."""
        self.drain()
        self.end_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.in_thread(self.namespaces.close)
        if self.share is not None:
            await self.in_thread(self.share.close)
        self._threads.shutdown(wait=True)
        gc.unfreeze()
        await asyncio.get_running_loop().run_in_executor(None, self.lm.driver.close)

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Run something that takes milliseconds outside of the event loop."""

        def run() -> Result:
            try:
                return function()
            finally:
                release_thread_pool()  # what it has computed with torch must not slow down the driver's thread

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def submit(self, job: Job) -> Generation:
        """Check a job and return its generation, which waits for a place when it is first read.

        The caller has to close it. Raises an `ApiError` if the job cannot be taken.
        """
        if self.is_draining:
            raise _shutting_down()
        self.admission.check(job.answers)
        deadline = monotonic() + self.config.request_timeout
        try:
            state = self.namespaces.draft_state(job.tenant.namespace)
            prepared = await self.in_thread(partial(prepare, self.lm, job, state))
        except ConstraintError as error:
            raise ApiError(400, str(error), job.constraint_field) from error
        except Exception as error:
            raise as_api_error(error) from error
        return Generation(self, job, prepared, deadline)

    async def _save_at_intervals(self) -> None:
        while True:
            await asyncio.sleep(self.config.save_seconds)
            await self.in_thread(self.namespaces.save)

    def _sources(self, generation: Generation, event: asyncio.Event) -> list[Source]:
        assert self._wakeups is not None, "the service was not started"
        requests = {i: prepared.request for i, prepared in enumerate(generation.prepared)}
        every_step = generation.job.stream or generation.job.top_logprobs is not None
        return open_sources(self.lm, requests, every_step, self._wakeups.notifier(event))


class Generation:
    """The outputs of one job, as an asynchronous iterator of lists: all outputs that came since the last one.

    `close` gives up its place and cancels what is not finished, within one step; it is safe to call it twice.
    """

    def __init__(self, service: Service, job: Job, prepared: list[PreparedRequest], deadline: float) -> None:
        self.job = job
        self.prepared = prepared
        self._service = service
        self._deadline = deadline
        self._sources: list[Source] = []
        self._unfinished = len(prepared)
        self._created = monotonic()
        self._entered: float | None = None
        self._changed = asyncio.Event()
        self._last_output: dict[int, float] = {}  # when each streamed answer had its last output
        self._failed = self._expired = self._is_closed = False
        service.open.add(self)

    async def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
        try:
            await self._enter()
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, self._deadline - monotonic()), self._expire)
            try:
                while self._unfinished:
                    if outputs := await self._next():
                        yield outputs
            finally:
                timer.cancel()
        except ApiError:
            self._failed = True
            raise
        finally:
            self.close()

    async def _enter(self) -> None:
        """Wait for a place, then start to decode."""
        job, admission = self.job, self._service.admission
        if self._is_closed:
            raise _shutting_down()
        priority = job.priority + job.tenant.priority
        try:
            await admission.enter(
                job.client or job.tenant.name, priority, job.answers, max(0.0, self._deadline - monotonic())
            )
        except TimeoutError:
            self._expired = True
            raise self._timeout() from None
        self._entered = monotonic()
        self._service.metrics.admitted(self._entered - self._created)
        try:
            self._sources = self._service._sources(self, self._changed)
        except Exception as error:
            raise as_api_error(error) from error

    async def _next(self) -> list[StepOutput]:
        await self._changed.wait()
        self._changed.clear()
        if self._is_closed:
            raise _shutting_down()
        if self._expired:
            raise self._timeout()
        outputs = [output for source in self._sources for output in source.take()]
        for output in outputs:
            if output.error is not None:
                self._service.metrics.log_failure(output.error)
                raise as_api_error(output.error) from output.error
            if self.job.stream and output.tokens:
                self._measure(output)
            if output.result is not None:
                self._unfinished -= 1
                self._service.metrics.finished_answer(output.result)
        return outputs

    def _measure(self, output: StepOutput) -> None:
        now, last = monotonic(), self._last_output.get(output.index)
        if last is None:
            self._service.metrics.first_token(now - self._created)
        else:
            self._service.metrics.next_tokens(now - last, len(output.tokens))
        self._last_output[output.index] = now

    def _timeout(self) -> ApiError:
        limit = self._service.config.request_timeout
        return ApiError(504, f"The request took longer than {limit:g} s: ask for fewer tokens, or try again later.")

    def _expire(self) -> None:
        self._expired = True
        self._changed.set()

    def close(self) -> None:
        """Cancel what is not finished, and give up the place."""
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        for source in self._sources:
            source.cancel(wait=False)
        if self._entered is not None:
            self._service.admission.leave(self.job.answers, monotonic() - self._entered)
        self._service.open.discard(self)
        outcome = "timeout" if self._expired else "failed" if self._failed else "cancelled"
        self._service.metrics.ended(outcome if self._unfinished else "completed", monotonic() - self._created)


def _shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down: send the request again, or to another server.", retry_after=5)
