"""Torch's threads beside threads of our own.

After an operation on two threads or more, torch's threads stay awake for milliseconds, waiting for the next one. A
compiled step that begins meanwhile has to share the cores with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Kept(threading.local):
    count = 0  # of torch's threads before it was left one, in this thread


_kept = _Kept()


def num_threads() -> int:
    """Return the number of threads that torch uses, or would use."""
    return _kept.count or torch.get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch's operations in this thread run on this thread alone while the context is open."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    _kept.count = before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _kept.count = 0


@contextmanager
def all_torch_threads() -> Iterator[None]:
    """Undo `one_torch_thread` while the context is open."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
