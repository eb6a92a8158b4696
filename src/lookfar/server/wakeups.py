"""From the driver's thread to an event loop: readers are woken, many outputs with one wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Wakeups:
    """Sets events of an event loop from another thread.

    Waking a loop costs a system call, every event that is set costs time of the interpreter that the driver's thread
    needs for its next step, and a step has an output for every request. So all events that are pending are set at once,
    and not again within `interval` seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float = 0.0) -> None:
        self._loop = loop
        self._interval = interval
        self._last = -interval  # when events were set
        self._pending: deque[asyncio.Event] = deque()
        self._is_scheduled = False

    def notifier(self, event: asyncio.Event) -> Callable[[], None]:
        """Return a function that sets the event, for any thread."""

        def notify() -> None:
            self._pending.append(event)
            if not self._is_scheduled:
                self._is_scheduled = True
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    self._loop.call_soon_threadsafe(self._wait_and_set)

        return notify

    def _wait_and_set(self) -> None:
        if (left := self._last + self._interval - self._loop.time()) > 0:
            self._loop.call_later(left, self._set_all)
        else:
            self._set_all()

    def _set_all(self) -> None:
        self._last = self._loop.time()
        self._is_scheduled = False  # first: an event that is added from here on schedules another call
        while self._pending:
            self._pending.popleft().set()
