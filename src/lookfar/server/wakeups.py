"""From the driver's thread to an event loop: readers are woken, many outputs with one wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Wakeups:
    """Sets events of an event loop from another thread.

    Waking a loop costs a system call, and a step of the engine has an output for every request, so all events that are
    pending when the loop gets to it are set at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[asyncio.Event] = deque()
        self._is_scheduled = False

    def notifier(self, event: asyncio.Event) -> Callable[[], None]:
        """Return a function that sets the event, for any thread."""

        def notify() -> None:
            self._pending.append(event)
            if not self._is_scheduled:
                self._is_scheduled = True
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    self._loop.call_soon_threadsafe(self._set_all)

        return notify

    def _set_all(self) -> None:
        self._is_scheduled = False  # first: an event that is added from here on schedules another call
        while self._pending:
            self._pending.popleft().set()
