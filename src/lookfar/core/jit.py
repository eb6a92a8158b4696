"""Compiled host code: numba compiles a function on its first call and caches the result on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from numba import njit

from lookfar.core.compiled_dir import compiled_dir
from lookfar.core.jit_cache import CompiledFunction

_config: Any = numba.config


def is_disabled() -> bool:
    """Whether numba's compiler is turned off, without which the host code does not run."""
    return bool(_config.DISABLE_JIT)


def jit(function: Callable[..., Any], nogil: bool = False) -> Callable[..., Any]:
    """Compile a function of NumPy arrays, tuples of them, and numbers.

    Numba infers the argument types at run time, so these functions carry no annotations. `nogil`: other threads of
    Python run meanwhile.
    """
    compiled: Any = njit(function, nogil=nogil)
    before = _config.CACHE_DIR
    try:
        _config.CACHE_DIR = before or str(compiled_dir())  # the package's own directory may be read-only
        compiled._cache = CompiledFunction(function)  # as `njit(cache=True)` sets numba's own
    except RuntimeError:  # there is no place to write to: compile again in every process
        pass
    finally:
        _config.CACHE_DIR = before
    return cast("Callable[..., Any]", compiled)


def borrowing_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that makes no arrays, for the loops of compiled callers.

    It does not count references, which other compiled code does for every array, row and slice that it looks at.
    """
    without_counts: Any = {"_nrt": False}
    compiled: Callable[..., Any] = njit(**without_counts)(function)
    return compiled


def inline_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into its callers.

    For functions that take tuples of arrays in a loop: a call would count the references of every array in them.
    """
    compiled: Callable[..., Any] = njit(inline="always")(function)
    return compiled
