"""Groups of ranks for tests: one process each, on gloo, with one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis_server import free_port

TESTS = Path(__file__).parent
SECONDS = 240


@contextmanager
def started_ranks(ranks: int, *command: str, **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start Python with these arguments as so many ranks, as torchrun would; they end with the block."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path = os.pathsep.join([str(TESTS), *sys.path])
    processes = []
    for rank in map(str, range(ranks)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **common, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for all ranks; returns the exit code, standard output and standard error of each."""
    outputs = [process.communicate(timeout=SECONDS) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run_ranks(ranks: int, *command: str, **environment: str) -> list[tuple[int, str, str]]:
    """Run Python as so many ranks until all have ended."""
    with started_ranks(ranks, *command, **environment) as processes:
        return finish(processes)
