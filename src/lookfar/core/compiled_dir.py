"""The directory of compiled host code. This module imports neither numba nor torch."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from lookfar.core.cache_dir import cache_dir

USES_JIT = b"lookfar.core.jit"  # in the source of each module with compiled functions
ALL_COMPILED = "cpu"  # kernels/cpu, whose constants and instructions are compiled into the functions beside them


@cache
def compiled_dir() -> Path:
    """Return a directory for this state of the compiled functions: numba does not notice changes of called ones."""
    here = Path(__file__).parent
    state = hashlib.sha256()
    for file in sorted(here.parent.rglob("*.py")):
        text = file.read_bytes()
        if USES_JIT in text or file == here / "jit.py" or file.parent.name == ALL_COMPILED:
            state.update(text)
    return cache_dir() / "compiled" / state.hexdigest()[:16]
