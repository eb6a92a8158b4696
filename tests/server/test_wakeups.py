"""Wake-ups of an event loop by another thread."""

from __future__ import annotations

import asyncio
import time
from threading import Thread

from lookfar.server.wakeups import Wakeups


def count_wakeups(interval: float, notifications: int, pause: float) -> int:
    """Return how often a reader is woken by so many notifications from another thread."""

    async def read() -> int:
        event, woken, done = asyncio.Event(), 0, False
        wakeups = Wakeups(asyncio.get_running_loop(), interval)

        def write() -> None:
            nonlocal done
            for number in range(notifications):
                done = number == notifications - 1
                wakeups.notifier(event)(False)
                time.sleep(pause)

        thread = Thread(target=write)
        thread.start()
        while not done or event.is_set():
            await asyncio.wait_for(event.wait(), 5)
            event.clear()
            woken += 1
        await asyncio.to_thread(thread.join)
        return woken

    return asyncio.run(read())


def test_outputs_within_the_interval_are_read_together() -> None:
    assert count_wakeups(interval=0.1, notifications=20, pause=0.005) <= 5


def test_a_reader_that_is_not_notified_again_is_woken_by_a_timer() -> None:
    async def read() -> None:
        event = asyncio.Event()
        notify = Wakeups(asyncio.get_running_loop(), 0.05).notifier(event)
        for _ in range(3):
            Thread(target=notify, args=(False,)).start()
            await asyncio.wait_for(event.wait(), 5)
            event.clear()

    asyncio.run(read())


def test_a_timer_with_nothing_to_do_changes_nothing() -> None:
    async def read() -> None:
        wakeups = Wakeups(asyncio.get_running_loop(), 0.05)
        event = asyncio.Event()
        wakeups.notifier(event)(True)
        await asyncio.sleep(0.01)
        wakeups.notifier(event)(False)  # which starts a timer
        wakeups.notifier(event)(True)
        await asyncio.sleep(0.01)
        following = wakeups._next
        await asyncio.sleep(0.15)
        assert wakeups._next == following

    asyncio.run(read())


def test_without_an_interval_nothing_waits() -> None:
    assert count_wakeups(interval=0.0, notifications=10, pause=0.02) >= 8


def test_the_last_output_of_a_request_does_not_wait() -> None:
    async def read() -> float:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        notify = Wakeups(loop, 10.0).notifier(event)
        notify(False)
        await event.wait()
        event.clear()
        began = loop.time()
        notify(False)
        Thread(target=notify, args=(True,)).start()
        await event.wait()
        return loop.time() - began

    assert asyncio.run(read()) < 5
