"""From the driver's thread to an event loop: readers are woken, many outputs with one wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lookfar.engine.driver import Notify

STREAMS, MAX_INTERVALS = 8, 6  # one interval more for so many streams


class Wakeups:
    """Sets events of an event loop from another thread.

    Waking a loop costs a system call, every event that is set costs time of the interpreter that the driver's thread
    needs for its next step, and a step has an output for every request. So all events that are pending are set at once,
    and not again within `interval` seconds, or several times that if there are many. The last output of a request does
    not wait: its place is free. Events are set when the driver notifies, because the device works then and the driver
    waits; a timer sets those that are still pending when it no longer notifies.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float = 0.0) -> None:
        self._loop = loop
        self._interval = interval
        self._next = 0.0  # when events may be set again
        self._pending: deque[asyncio.Event] = deque()
        self._is_scheduled = self._has_timer = False

    def notifier(self, event: asyncio.Event) -> Notify:
        """Return a function that sets the event, for any thread."""

        def notify(is_last: bool) -> None:
            self._pending.append(event)
            if is_last or self._loop.time() >= self._next:
                if not self._is_scheduled:
                    self._is_scheduled = True
                    self._call(self._set_all)
            elif not self._has_timer:
                self._has_timer = True
                self._call(self._start_timer)

        return notify

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(function)

    def _start_timer(self) -> None:
        self._loop.call_at(self._next + self._interval, self._end_timer)

    def _end_timer(self) -> None:
        self._has_timer = False
        self._set_all()

    def _set_all(self) -> None:
        self._is_scheduled = False  # first: an event that is added from here on schedules another call
        if not self._pending:  # a timer has nothing left to do
            return
        events = set()
        while self._pending:
            events.add(self._pending.popleft())
        for event in events:
            event.set()
        waits = min(1 + len(events) // STREAMS, MAX_INTERVALS)
        self._next = self._loop.time() + waits * self._interval
