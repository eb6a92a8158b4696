"""Locks that a forked process finds free."""

from __future__ import annotations

import os
from threading import RLock
from typing import Any
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()
_held: list[Any] = []


def fork_safe_lock() -> Any:
    """Return a reentrant lock. A fork waits until it is free, so a child gets it free and its data complete."""
    lock = RLock()
    _locks.add(lock)
    return lock


def _acquire_all() -> None:
    _held[:] = list(_locks)
    for lock in _held:
        lock.acquire()


def _release_all() -> None:
    for lock in _held:
        lock.release()
    _held.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)
