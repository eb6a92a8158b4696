"""The library that multiplies matrices: cuBLAS or cuBLASLt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch

CUBLASLT_ROWS = (32, 64)  # numbers of rows that cuBLASLt multiplies faster (measured on an H200, docs/benchmarks.md)


@contextmanager
def blas_library(name: str) -> Iterator[None]:
    """Multiply with this library while the context is open."""
    _silence_blas_notice()
    usual = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(usual)


@cache
def _silence_blas_notice() -> None:
    """Trigger a notice of torch while standard error is closed.

    torch prints once, past Python's warnings, that choosing a library is experimental. It would appear in the middle of
    a program's output.
    """
    usual = torch.backends.cuda.preferred_blas_library()
    with suppress(OSError), open(os.devnull, "w") as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            torch.backends.cuda.preferred_blas_library("cublaslt")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            torch.backends.cuda.preferred_blas_library(usual)
