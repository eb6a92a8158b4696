"""Files that are written whole or not at all, and by one process at a time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file beside `path` and move it there; after an `OSError` what was there before is there still."""
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
    """What a JSON file holds; None if nothing can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Put what `change` makes of a JSON file's contents (None if there are none) in their place; others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        replace_file(path, [json.dumps(change(read_json(path)), indent=1).encode()])
