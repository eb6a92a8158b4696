"""The OpenMP workers of a thread, with which torch computes on a CPU.

libgomp keeps a pool of workers for each thread that has computed. As soon as there are more workers than cores, it no
longer lets them spin between two loops, and every step of a small model takes half as long again. So a thread that
waits for another one to compute gives up its pool. libgomp creates it again when it is needed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

PAUSE_SOFT = 1  # omp_pause_soft


def release_thread_pool() -> None:
    """Give up the OpenMP workers of the calling thread, if it has some and computes nothing at present."""
    pause = _pause_function()
    if pause is not None:
        pause()


@cache
def _pause_function() -> Callable[[], Any] | None:
    """Return the function of the loaded libgomp; None if torch uses another library."""
    package = Path(torch.__file__).parent
    bundled = [
        str(file) for folder in (package / "lib", package.parent / "torch.libs") for file in folder.glob("libgomp*")
    ]
    for name in ("libgomp.so.1", *bundled):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
            pause, device = library.omp_pause_resource, library.omp_get_initial_device()
        except (OSError, AttributeError):  # not loaded, or older than OpenMP 5.0
            continue
        return lambda: pause(PAUSE_SOFT, device)
    return None
