"""Compiling the host's code ahead, in a second process, while this one imports torch and loads a model.

numba compiles each function on its first call, all of them together in about 13 seconds, and holds Python's lock all
the while. The second process decodes a few tokens with a tiny model and so fills the cache on disk, once for each
version of lookfar. If it fails, functions are compiled on their first call as before.
"""

from __future__ import annotations

import atexit
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from lookfar.core.compiled_dir import compiled_dir
from lookfar.core.progress import progress_bar

_running: list[subprocess.Popen[bytes]] = []


def marker() -> Path:
    """Return the file that says that all code is compiled, for these versions and this kind of machine."""
    return compiled_dir() / f"all-{platform.python_version()}-{version('numba')}-{platform.machine()}"


def is_compiled() -> bool:
    return marker().exists()


def start() -> None:
    """Begin to compile in a second process if that was not done yet, can be kept, and there is a core for it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if _running or cores < 2 or os.environ.get("RANK", "0") != "0" or is_compiled() or not _can_be_kept():
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "lookfar.rehearsal"]
    with suppress(OSError):
        _running.append(subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet))
        atexit.register(stop)


def _can_be_kept() -> bool:
    """Whether compiled code goes to our own directory, and that can be written."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return False
    try:
        compiled_dir().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(compiled_dir(), os.W_OK)


def wait() -> None:
    """Wait until all is compiled, or has failed."""
    while _running:
        with progress_bar("Compiling the host's code (once, about half a minute)"):
            _running[-1].wait()
        _running.pop()


def stop() -> None:
    """End the second process."""
    while _running:
        process = _running.pop()
        process.terminate()
        process.wait()


def done() -> None:
    """Record that all is compiled; called by the second process."""
    with suppress(OSError):
        marker().parent.mkdir(parents=True, exist_ok=True)
        marker().touch()
