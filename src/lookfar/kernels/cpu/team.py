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
        self._job: Callable[[int], Any] | None = None  # None: the threads end
        self._go = [threading.Semaphore(0) for _ in range(1, size)]
        self._done = [threading.Semaphore(1) for _ in range(1, size)]
        for rank in range(1, size):
            threading.Thread(target=self._work, args=(rank,), name=f"lookfar-step-{rank}", daemon=True).start()

    def _work(self, rank: int) -> None:
        while True:
            self._go[rank - 1].acquire()
            if self._job is None:
                return
            try:
                self._job(rank)
            finally:
                self._done[rank - 1].release()

    def run(self, job: Callable[[int], Any]) -> None:
        """Run a job on all threads. It releases Python's lock and ends with a barrier, so all of it is done then.

        The job is kept until the next one: a thread may pass the barrier later than the caller.
        """
        self._start(job)
        job(0)

    def close(self) -> None:
        """End the threads."""
        self._start(None)

    def _start(self, job: Callable[[int], Any] | None) -> None:
        for done in self._done:
            done.acquire()  # with the last job
        self._job = job
        for go in self._go:
            go.release()


class _Present:
    """The team of this process: one, so that models that decode at the same time take turns on the cores."""

    lock = threading.Lock()
    team: Team | None = None


def run_together(job: Callable[[int], Any], size: int) -> None:
    """Run `job(rank)` on so many threads at once."""
    with _Present.lock:
        if _Present.team is not None and _Present.team.size != size:
            _Present.team.close()
            _Present.team = None
        if _Present.team is None:
            _Present.team = Team(size)
        _Present.team.run(job)


def _forget_team() -> None:
    """A forked process has none of the threads, and perhaps a lock that is held."""
    _Present.lock, _Present.team = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_team)
