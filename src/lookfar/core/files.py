"""Atomic file replacement, and JSON files that several processes update."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

LOCK_SECONDS = 5.0  # to wait for another process that updates a file


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a temporary file beside `path` and rename it; on an `OSError` the old file is unchanged."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file, or None if it is missing or unreadable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def update_json(path: Path, update: Callable[[Any], Any]) -> None:
    """Replace a JSON file's contents by `update(contents)` under a lock; `contents` is None for a new file.

    Raises an `OSError` if the file cannot be written, or another process holds the lock for long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
        replace_file(path, [json.dumps(update(read_json(path)), indent=1).encode()])
