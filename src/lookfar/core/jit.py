"""Compiled host code: numba compiles a function on its first call and caches the result on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of NumPy arrays, tuples of them, and numbers.

    Numba infers the argument types at run time, so these functions carry no annotations.
    """
    compiled: Callable[..., Any] = njit(cache=True)(function)
    return compiled


def inline_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into its callers.

    For functions that take tuples of arrays in a loop: a call would count the references of every array in them.
    """
    compiled: Callable[..., Any] = njit(inline="always")(function)
    return compiled
