"""Where the outputs of a job come from, read without blocking: the driver, or transformers for what it cannot take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from threading import Lock, Semaphore, Thread
from typing import Protocol

from lookfar.engine.driver import Notify
from lookfar.engine.fallback import QUEUE_LIMIT, FallbackStream
from lookfar.engine.outputs import StepOutput
from lookfar.engine.request import Request
from lookfar.lm import LM

_one_at_a_time = Lock()  # requests that transformers decodes


class Source(Protocol):
    """The outputs of some requests."""

    def take(self) -> list[StepOutput]:
        """Return the outputs that have come since the last call; an error is the last output of its request."""

    def cancel(self, wait: bool = True) -> None:
        """Cancel what is not finished."""


def open_sources(lm: LM, requests: Mapping[int, Request], stream: bool, notify: Notify) -> list[Source]:
    """Start to decode requests; `notify` is called in other threads when there is something to take."""
    reason = lm.why_call_falls_back()
    ours = {i: r for i, r in requests.items() if not (reason or lm.why_request_falls_back(r))}
    others = {i: r for i, r in requests.items() if i not in ours}
    sources: list[Source] = []
    if ours:
        sources.append(lm.driver.submit(ours, stream, notify))
    if others:
        sources.append(FallbackSource(lm, others, notify))
    return sources


class FallbackSource:
    """Requests that transformers decodes, one after the other."""

    def __init__(self, lm: LM, requests: dict[int, Request], notify: Notify) -> None:
        self._lm = lm
        self._requests = requests
        self._notify = notify
        self._outputs: deque[StepOutput] = deque()
        self._room = Semaphore(QUEUE_LIMIT)  # a reader that falls behind makes the decoding wait
        self._stream: FallbackStream | None = None
        self._is_cancelled = False
        Thread(target=self._work, name="lookfar-fallback", daemon=True).start()

    def take(self) -> list[StepOutput]:
        outputs = []
        while self._outputs:
            outputs.append(self._outputs.popleft())
            self._room.release()
        return [] if self._is_cancelled else outputs

    def cancel(self, wait: bool = True) -> None:
        self._is_cancelled = True
        self._room.release(QUEUE_LIMIT)
        if self._stream is not None:
            self._stream.cancel(wait=False)

    def _work(self) -> None:
        index = min(self._requests)
        try:
            with _one_at_a_time:
                if self._is_cancelled:
                    return
                self._stream = FallbackStream(self._lm.model, self._requests)
                for output in self._stream:
                    index = output.index
                    self._put(output)
                    if self._is_cancelled:
                        self._stream.cancel()
                        return
        except BaseException as error:
            self._put(StepOutput(-1, index, error=error))

    def _put(self, output: StepOutput) -> None:
        self._room.acquire()
        self._outputs.append(output)
        self._notify(output.is_last)
