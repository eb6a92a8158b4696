"""Groups of ranks for tests: one process each, on gloo, with one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from redis_server import free_port

TESTS = Path(__file__).parent
SECONDS = 240


def start_ranks(ranks: int, *command: str, **environment: str) -> list[subprocess.Popen[str]]:
    """Start Python with these arguments as so many ranks, as torchrun would."""
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
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for all ranks; returns the exit code, standard output and standard error of each."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run_ranks(ranks: int, *command: str, **environment: str) -> list[tuple[int, str, str]]:
    """Run Python as so many ranks until all have ended."""
    return finish(start_ranks(ranks, *command, **environment))
