"""Compiled host code: numba when a function is first called, kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of NumPy arrays and numbers. What it takes is known at run time, so it has no annotations."""
    compiled: Callable[..., Any] = njit(cache=True)(function)
    return compiled
