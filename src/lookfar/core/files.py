"""Atomic file replacement, and JSON files that several processes update."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows: files of killed processes stay
    fcntl = None  # type: ignore[assignment]

PART = ".part"  # ends the name of a file that is being written
LOCK_SECONDS = 5.0  # to wait for another process that updates a file


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a temporary file beside `path` and rename it; on an `OSError` the old file is unchanged."""
    _remove_abandoned(path)
    handle, temporary = _temporary_file(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _temporary_file(path: Path) -> tuple[int, str]:
    """Create a file that is locked for as long as its writer lives."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        if fcntl is None:
            return handle, name
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                return handle, name
        except BlockingIOError:
            pass
        except OSError:
            return handle, name  # a file system without locks
        os.close(handle)  # another process has taken it for abandoned before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes have left of earlier attempts to write this file."""
    if fcntl is None:
        return
    for other in path.parent.glob(f".{glob.escape(path.name)}.*{PART}"):
        with contextlib.suppress(OSError), open(other, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink()


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file, or None if it is missing or unreadable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def update_json(path: Path, update: Callable[[Any], Any]) -> None:
    """Replace a JSON file's contents by `update(contents)` under a lock; `contents` is None for a new file.

    Raises an `OSError` if the file cannot be written, or another process holds the lock for long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
        replace_file(path, [json.dumps(update(read_json(path)), indent=1).encode()])
