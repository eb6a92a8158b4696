"""The directory where lookfar keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_dir() -> Path:
    """Return `$LOOKFAR_CACHE`, or `lookfar` in the user's cache directory."""
    if own := os.environ.get("LOOKFAR_CACHE"):
        return Path(own)
    return user_cache_path("lookfar", appauthor=False)
