"""The driver: one thread that steps an engine while there is work, for any number of callers.

Callers submit requests and read their outputs from a bounded queue. A reader that falls behind does not stop others:
when its queue is full, its requests are paused and give up their place in the KV cache; they go on when it reads again,
and nothing is lost.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread, get_ident
from typing import TypeVar
from weakref import WeakSet, finalize, ref

import torch

from lookfar.core.host_team import sharing_work
from lookfar.core.locks import fork_safe_lock
from lookfar.engine.engine import Engine
from lookfar.engine.outputs import RequestResult, StepOutput
from lookfar.engine.request import Request
from lookfar.engine.thread_pool import release_thread_pool
from lookfar.errors import LookfarError

QUEUE_LIMIT = 64  # outputs of one request that wait for their reader
CLOSE_SECONDS = 10.0  # to wait for the step that is under way when the driver is closed

IDLE_SECONDS = 0.05  # without requests before steps are captured and the prior is computed

Message = Callable[[], None]
Notify = Callable[[bool], None]  # told whether an output is the last one of its request
Result = TypeVar("Result")
_drivers: WeakSet[Driver] = WeakSet()


class Submission:
    """The outputs of the requests of one call, in the order in which they were made."""

    def __init__(
        self, driver: Driver, requests: Mapping[int, Request], stream: bool, notify: Notify | None = None
    ) -> None:
        self.requests = requests  # by index
        self.stream = stream  # whether every step is wanted, or finished requests only
        self._notify = notify  # called in the driver's thread when there is an output for `take`
        self.handles: list[int] = []
        self.is_cancelled = False
        self._driver = driver
        self._process = os.getpid()
        self._unfinished = len(requests)
        self._queue: SimpleQueue[StepOutput | None] = SimpleQueue()
        self._limit = QUEUE_LIMIT * len(requests)
        self._paused = False

    def __iter__(self) -> Iterator[StepOutput]:
        while (output := self.next_output()) is not None:
            yield output

    def next_output(self) -> StepOutput | None:
        """Wait for the next output; None if there are no more, or the submission was cancelled.

        An error of a request is raised here, and cancels the other requests of the call.
        """
        if not self._unfinished:
            return None
        if self._driver.is_current_thread:
            raise LookfarError("A request cannot wait for another one of the same LM: read the stream outside of it.")
        if self._process != os.getpid():
            raise LookfarError("This stream belongs to the parent process: start a new one.")
        release_thread_pool()
        output = self._queue.get()
        if output is None or self.is_cancelled:
            self._queue.put(None)  # for other readers
            return None
        self._received(output)
        if not self._unfinished:
            self._queue.put(None)  # for other readers
        if output.error is not None:
            self.cancel()
            raise output.error
        return output

    def take(self) -> list[StepOutput]:
        """Return the outputs that have come since the last call, without waiting; errors are among them.

        For one reader that does not block, such as an event loop: `notify` says when there is something to take.
        """
        outputs: list[StepOutput] = []
        with suppress(Empty):
            while (output := self._queue.get_nowait()) is not None:
                self._received(output)
                outputs.append(output)
        return [] if self.is_cancelled else outputs

    def _received(self, output: StepOutput) -> None:
        """Count an output that was read, and go on with paused requests when half of the queue is read."""
        if self._paused and self._queue.qsize() <= self._limit // 2:
            self._paused = False
            self._driver.post(self._resume)
        self._unfinished -= output.is_last

    def results(self, on_step: Callable[[StepOutput], None] | None = None) -> dict[int, RequestResult]:
        """Wait for all requests and return their results by index; `on_step` gets every output."""
        results = {}
        for output in self:
            if on_step is not None:
                on_step(output)
            if output.result is not None:
                results[output.index] = output.result
        return results

    def cancel(self, wait: bool = True) -> None:
        """Cancel what is not finished; from any thread, any number of times. By default waits until it is done."""
        if self.is_cancelled or not self._unfinished:
            return
        self.is_cancelled = True
        self._queue.put(None)
        self._driver.cancel(self, wait)

    def deliver(self, output: StepOutput) -> None:
        """Hand over an output, in the driver's thread; pause the requests if the reader is too far behind."""
        if not (self.stream or output.is_last):
            return
        self._queue.put(output)
        if self._queue.qsize() >= self._limit and not self._paused:
            self._paused = True
            if self._queue.qsize() <= self._limit // 2:
                self._paused = False  # the reader has caught up meanwhile, and did not see the flag
            else:
                try:
                    for handle in self.handles:
                        self._driver.engine.pause(handle)
                except Exception:  # no memory for a copy of its KV: decode on, and try again with the next output
                    self._paused = False
        if self._notify is not None:
            self._driver.notify_later(self._notify, output.is_last)

    def _resume(self) -> None:
        for handle in reversed(self.handles):  # each goes to the front of the queue
            self._driver.engine.resume(handle)


class Driver:
    """Steps an engine in a thread of its own. The thread starts with the first request and ends with the driver."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.works_when_idle = False  # for programs that use the model through this driver only
        self._inbox: SimpleQueue[Message | None] = SimpleQueue()  # of the present thread
        self._lock = fork_safe_lock()  # reentrant: a stream that is collected meanwhile posts its cancellation
        self._thread: Thread | None = None
        self._ending: Thread | None = None  # the one before
        self._process = os.getpid()
        self._submissions: dict[int, Submission] = {}  # by handle of their requests
        self._notifications: dict[Notify, bool] = {}  # readers to notify, and whether a last output is among theirs
        _drivers.add(self)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the driver's thread, as logits processors do; it must not wait there."""
        return self._thread is not None and self._thread.ident == get_ident()

    def submit(self, requests: Mapping[int, Request], stream: bool = False, notify: Notify | None = None) -> Submission:
        """Submit the requests of one call, by index. Raises an error if one of them cannot be decoded.

        `notify` is called in the driver's thread after every step with an output; it must not block or fail.
        """
        for request in requests.values():
            self.engine.check(request)
        for request in requests.values():
            if request.sampling.random is not None:
                request.sampling.random.noise.start()
        submission = Submission(self, requests, stream, notify)
        self.post(lambda: self._add(submission))
        return submission

    def cancel(self, submission: Submission, wait: bool) -> None:
        """Cancel the requests of a submission; with `wait`, return when they are gone."""
        done = Event()

        def cancel() -> None:
            try:
                for handle in submission.handles:
                    self._submissions.pop(handle, None)
                    self.engine.cancel(handle)
            finally:
                done.set()

        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # closed, or the program ends
                cancel()
                return
            self.post(cancel)
        if wait and not self.is_current_thread:
            done.wait()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the driver's thread, between two steps; return its result or raise its error."""
        if self.is_current_thread:
            return function()
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.post(run)
        release_thread_pool()
        return done.result()

    def post(self, message: Message) -> None:
        """Have a message handled in the driver's thread, between two steps."""
        with self._lock:
            if self._process != os.getpid():
                self._forget_parent()
            self._inbox.put(message)
            if self._thread is None or not self._thread.is_alive():
                arguments = ref(self), self._inbox, self._ending
                self._thread = Thread(target=_drive, args=arguments, name="lookfar", daemon=True)
                self._thread.start()
                finalize(self, self._inbox.put, None)

    def close(self) -> None:
        """Stop the thread after the step that is under way; requests that are not finished get an error."""
        with self._lock:
            thread, inside = self._thread, self.is_current_thread
            if thread is None or not thread.is_alive():
                return
            self._inbox.put(self._abort)
            self._inbox.put(None)
            self._thread, self._ending, self._inbox = None, thread, SimpleQueue()
        if not inside:
            thread.join(CLOSE_SECONDS)

    def run(self, message: Message | None, inbox: SimpleQueue[Message | None]) -> bool:
        """Handle a message and step until there is no work left; False if the thread has to end."""
        while message is not None:
            try:
                message()
                self._notify_all()
                while self.engine.has_work and inbox.empty():
                    self._step()
                if inbox.empty():
                    self.engine.settle()
                    return True
            except BaseException as error:  # a bug in the engine: no request can continue
                self._deliver(self.engine.abort(error))
                self._notify_all()
            message = inbox.get()
        return False

    def work_when_idle(self) -> bool:
        """Capture a step that was missing, or else compute a part of the prior; returns whether there is more to do."""
        if not self.works_when_idle or self.engine.has_work:
            return False
        try:
            return self.engine.capture_wanted() or self.engine.extend_prior()
        except Exception:  # of a model that was changed meanwhile, for example: the next request will say so
            return False

    def _step(self) -> None:
        """Run a step. On a device of its own, readers are notified while the next step runs there.

        What they do then takes no time from the host's part of a step.
        """
        self._deliver(self.engine.step(self._notify_all))
        if not (self.engine.runner.limits.captured and self.engine.has_work):
            self._notify_all()

    def notify_later(self, notify: Notify, is_last: bool) -> None:
        """Have a reader notified when the driver has time for it, within a step."""
        self._notifications[notify] = is_last or self._notifications.get(notify, False)

    def _notify_all(self) -> None:
        notifications, self._notifications = self._notifications, {}
        for notify, is_last in notifications.items():
            notify(is_last)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            submission = self._submissions.get(output.handle)
            if submission is not None:
                if output.is_last:
                    del self._submissions[output.handle]
                submission.deliver(output)

    def _add(self, submission: Submission) -> None:
        for index, request in submission.requests.items():
            if submission.is_cancelled:
                return
            try:
                handle = self.engine.add(request, index, submission.stream)
            except BaseException as error:  # a drafter that cannot be made, or costs that cannot be measured
                submission.deliver(StepOutput(-1, index, error=error))
                return
            submission.handles.append(handle)
            self._submissions[handle] = submission

    def _abort(self) -> None:
        self._deliver(
            self.engine.abort(LookfarError("The engine was closed before the request ended: submit it again."))
        )

    def _forget_parent(self) -> None:
        """Start over in a forked process: the thread and the callers are the parent's."""
        self._process, self._thread, self._ending = os.getpid(), None, None
        self._inbox = SimpleQueue()
        self._submissions.clear()
        self._notifications.clear()
        self.engine.abort(LookfarError("The request belongs to the parent process."))


def _drive(driver_of: ref[Driver], inbox: SimpleQueue[Message | None], before: Thread | None) -> None:
    """Run a driver, after the thread `before`. While it is idle, the thread does not keep the driver alive."""
    if before is not None:
        before.join()
    torch.set_grad_enabled(False)  # of this thread
    patience = None
    while True:
        release_thread_pool()
        try:
            message = inbox.get(timeout=patience)
        except Empty:
            driver = driver_of()
            patience = IDLE_SECONDS if driver is not None and driver.work_when_idle() else None
            del driver
            continue
        driver = driver_of()
        if driver is None or message is None:
            return
        if driver.engine.runner.model.device.type == "cuda":
            torch.cuda.set_device(driver.engine.runner.model.device)
        with sharing_work(driver.engine.runner.limits.captured):  # on a CPU, the next step needs the cores
            if not driver.run(message, inbox):
                return
        patience = IDLE_SECONDS if driver.works_when_idle else None
        del driver, message


@atexit.register
def _close_all() -> None:
    """Stop all driver threads before the interpreter exits: it would crash if one were inside torch."""
    for driver in list(_drivers):
        driver.close()
