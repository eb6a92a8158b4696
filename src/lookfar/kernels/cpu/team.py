"""The threads that compute a step on a CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class Team:
    """Threads that run one compiled function together, each with its own rank; the caller is rank 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._job: Callable[[int], Any] = _nothing
        self._go = [threading.Semaphore(0) for _ in range(1, size)]
        self._done = [threading.Semaphore(1) for _ in range(1, size)]
        for rank in range(1, size):
            threading.Thread(target=self._work, args=(rank,), name=f"lookfar-step-{rank}", daemon=True).start()

    def _work(self, rank: int) -> None:
        while True:
            self._go[rank - 1].acquire()
            self._job(rank)
            self._done[rank - 1].release()

    def run(self, job: Callable[[int], Any]) -> None:
        """Run a job on all threads. It releases Python's lock and ends with a barrier, so all of it is done then."""
        for done in self._done:
            done.acquire()  # with the last job
        self._job = job
        for go in self._go:
            go.release()
        job(0)


def _nothing(rank: int) -> None:
    pass


class _Teams:
    """The team of this process: one, so that models that decode at the same time take turns on the cores."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.team: Team | None = None
        self.process = 0


_teams = _Teams()


def run_together(job: Callable[[int], Any], size: int) -> None:
    """Run `job(rank)` on so many threads at once."""
    if _teams.process != os.getpid():  # a forked process has none of the threads, and perhaps a lock that is held
        _teams.__init__()  # type: ignore[misc]
        _teams.process = os.getpid()
    with _teams.lock:
        if _teams.team is None or _teams.team.size != size:
            _teams.team = Team(size)
        _teams.team.run(job)
