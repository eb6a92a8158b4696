"""Admission: which of the waiting requests goes to the engine next, and how many may wait."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from math import ceil

from lookfar.server.errors import ApiError

AHEAD = 2  # answers that wait inside the engine, so that a free slot never waits for the event loop
MAX_RETRY_SECONDS = 60


@dataclass(eq=False)
class _Waiter:
    client: str
    priority: int
    answers: int
    let_in: asyncio.Future[None]


@dataclass
class _Queue:
    """The waiting requests of one priority; the clients take turns."""

    turns: deque[str] = field(default_factory=deque)
    of_client: dict[str, deque[_Waiter]] = field(default_factory=dict)

    def add(self, waiter: _Waiter) -> None:
        if waiter.client not in self.of_client:
            self.of_client[waiter.client] = deque()
            self.turns.append(waiter.client)
        self.of_client[waiter.client].append(waiter)

    def pop(self) -> _Waiter:
        client = self.turns.popleft()
        waiter = self.of_client[client].popleft()
        if self.of_client[client]:
            self.turns.append(client)
        else:
            del self.of_client[client]
        return waiter

    def remove(self, waiter: _Waiter) -> bool:
        """Remove a waiter; False if it is not there."""
        waiters = self.of_client.get(waiter.client, deque())
        if waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self.of_client[waiter.client]
            self.turns.remove(waiter.client)
        return True


class Admission:
    """Lets requests into the engine as places become free: lower priorities first, then clients in turn.

    Only used on one event loop. The requests of one client and one priority are served in their order.
    """

    def __init__(self, places: int, max_queue: int) -> None:
        self.places = places + AHEAD
        self.max_queue = max_queue
        self.active = 0  # answers in the engine
        self.waiting = 0  # answers that wait here
        self._queues: dict[int, _Queue] = {}  # by priority, none of them empty
        self._seconds = 1.0  # that an answer takes, a moving average

    def check(self, answers: int) -> None:
        """Refuse answers that would have to wait in a full queue."""
        if not self._has_place and self.waiting + answers > self.max_queue:
            raise ApiError(
                429,
                f"{self.waiting} answers are waiting already: try again later.",
                code="rate_limit_exceeded",
                retry_after=self.retry_after,
            )

    async def enter(self, client: str, priority: int, answers: int, timeout: float) -> None:
        """Wait for a place; `leave` gives it back.

        Refuses with 429 if too many answers wait already, and raises a `TimeoutError` after `timeout` seconds.
        """
        self.check(answers)
        if self._has_place:
            self.active += answers
            return
        loop = asyncio.get_running_loop()
        waiter = _Waiter(client, priority, answers, loop.create_future())
        timer = loop.call_later(timeout, self._expire, waiter)
        self._queues.setdefault(priority, _Queue()).add(waiter)
        self.waiting += answers
        try:
            await waiter.let_in
        except asyncio.CancelledError:
            if waiter.let_in.cancelled():
                self._remove(waiter)
            elif waiter.let_in.exception() is None:  # it was let in at the same moment
                self.leave(answers)
            raise
        finally:
            timer.cancel()

    def _expire(self, waiter: _Waiter) -> None:
        if not waiter.let_in.done():
            self._remove(waiter)
            waiter.let_in.set_exception(TimeoutError())

    def refuse_all(self, error: ApiError) -> None:
        """Answer all waiting requests with an error."""
        for queue in list(self._queues.values()):
            for waiter in [one for waiters in queue.of_client.values() for one in waiters]:
                self._remove(waiter)
                if not waiter.let_in.done():
                    waiter.let_in.set_exception(error)

    def _remove(self, waiter: _Waiter) -> None:
        """Take a waiter out of its queue, if it is still there."""
        queue = self._queues.get(waiter.priority)
        if queue is not None and queue.remove(waiter):
            self.waiting -= waiter.answers
            self._drop_if_empty(waiter.priority)

    def leave(self, answers: int, seconds: float | None = None) -> None:
        """Give up the place; `seconds` is how long the answers took."""
        self.active -= answers
        if seconds is not None:
            self._seconds += 0.1 * (seconds - self._seconds)
        while self._queues and self.active < self.places:
            priority = min(self._queues)
            waiter = self._queues[priority].pop()
            self._drop_if_empty(priority)
            self.waiting -= waiter.answers
            if not waiter.let_in.done():  # otherwise it was cancelled, and its task does not know yet
                self.active += waiter.answers
                waiter.let_in.set_result(None)

    @property
    def _has_place(self) -> bool:
        return self.active < self.places and not self._queues

    def _drop_if_empty(self, priority: int) -> None:
        if not self._queues[priority].turns:
            del self._queues[priority]

    @property
    def retry_after(self) -> int:
        """Seconds after which a place in the queue should be free."""
        return max(1, min(MAX_RETRY_SECONDS, ceil(self._seconds * (self.waiting + 1) / self.places)))
