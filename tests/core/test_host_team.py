"""Threads that share the host's work: every part is done once, and a fork or the end of a process finds no helper."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest

from lookfar.core import host_team
from lookfar.core.host_team import HostTeam, job_of, present_team, run_parts, sharing_work
from lookfar.core.jit import borrowing_jit, jit


@borrowing_jit
def count_part(data, part):  # type: ignore[no-untyped-def]
    counts, rounds = data
    for _ in range(rounds):
        counts[part, 0] += part + 1


@jit
def count_all(team, counts, rounds):  # type: ignore[no-untyped-def]
    run_parts(team, len(counts), job_of(count_part, (counts, rounds)))


@pytest.fixture
def team() -> Iterator[HostTeam]:
    team = HostTeam(3)
    yield team
    team.close()


def counted(address: int, parts: int, rounds: int = 1) -> list[int]:
    counts = np.zeros((parts, 64), np.int64)
    count_all(address, counts, rounds)
    return [int(count) for count in counts[:, 0]]


def test_every_part_is_done_once(team: HostTeam) -> None:
    for turn in range(300):
        parts, rounds = 1 + turn % 40, 1 + 50 * (turn % 7)
        assert counted(team.address, parts, rounds) == [rounds * (part + 1) for part in range(parts)]
        if turn % 50 == 0:
            time.sleep(0.01)  # the helpers fall asleep
    assert counted(0, 5) == [1, 2, 3, 4, 5]


def test_two_threads_with_jobs_of_their_own(team: HostTeam) -> None:
    wrong: list[list[int]] = []

    def run(rounds: int) -> None:
        for _ in range(500):
            found = counted(team.address, 9, rounds)
            if found != [rounds * (part + 1) for part in range(9)]:
                wrong.append(found)

    threads = [Thread(target=run, args=(rounds,)) for rounds in (3, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_shares_its_work_only_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_team, "_team", HostTeam(1))
    assert present_team(8) == (0, 1)
    with sharing_work():
        address, parts = present_team(8)
        assert (address > 0, parts) == (True, 4)
        assert present_team(1) == (0, 1)
        others: list[tuple[int, int]] = []
        thread = Thread(target=lambda: others.append(present_team(8)))
        thread.start()
        thread.join()
        assert others == [(0, 1)]
    assert present_team(8) == (0, 1)


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def helpers(cores: int, asked: str = "") -> int:
        monkeypatch.setattr(host_team, "cores", lambda: cores)
        monkeypatch.setenv("LOOKFAR_HOST_THREADS", asked)
        return host_team.can_help()

    assert [helpers(cores) for cores in (1, 2, 4, 8, 16, 64)] == [0, 0, 0, 1, 3, 3]
    assert [helpers(16, asked) for asked in ("1", "2", "8", "0", "many")] == [0, 1, 7, 0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_team_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKFAR_HOST_THREADS", "2")
    code = """
import os, numpy as np
import test_host_team as t
from lookfar.core.host_team import present_team, sharing_work
with sharing_work():
    assert t.counted(present_team(8)[0], 8) == list(range(1, 9))
    child = os.fork()
    assert t.counted(present_team(8)[0], 8) == list(range(1, 9))
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    folder = os.path.dirname(__file__)
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == ("done\n", 0), run.stderr
