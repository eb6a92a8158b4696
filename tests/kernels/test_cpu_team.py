"""The threads of compiled CPU steps."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lookfar.kernels.cpu.team import run_together


def ranks_of(size: int) -> set[int]:
    """The ranks that run a job together; each of them waits for all others."""
    seen: set[int] = set()
    meeting = threading.Barrier(size)

    def job(rank: int) -> None:
        seen.add(rank)
        meeting.wait(timeout=20)

    run_together(job, size)
    return seen


def test_all_threads_run_a_job_whatever_their_number() -> None:
    before = threading.active_count()
    for size in (1, 3, 2, 2, 1):
        assert ranks_of(size) == set(range(size))
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("lookfar-step")]
    assert len(names) <= 2  # those of larger teams have ended or are about to
    assert threading.active_count() <= before + 2


def test_callers_take_turns() -> None:
    found: list[set[int]] = []
    callers = [threading.Thread(target=lambda: found.append(ranks_of(2))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [{0, 1}] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    assert ranks_of(2) == {0, 1}
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if ranks_of(2) == {0, 1} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
