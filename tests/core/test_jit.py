"""Compiled host code is kept in our cache directory, or nowhere; that is never an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from lookfar.core.jit import jit


def double(x):  # type: ignore[no-untyped-def]
    return 2 * x


def test_without_a_place_to_write_to_code_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert jit(double)(4) == 8


def test_compiled_code_goes_to_the_cache_directory(tmp_path: Path) -> None:
    script = (
        "import numpy as np; from lookfar.retrieval.recycle_table import RecycleTable, find_pair; "
        "print(find_pair(RecycleTable(9, 4).arrays.pair_keys, 1, 2))"
    )
    environment = os.environ | {"LOOKFAR_CACHE": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert shown.stdout.strip() == "-1", shown.stderr
    assert list((tmp_path / "compiled").rglob("*.nbi"))
    assert not numba.config.CACHE_DIR  # the setting of other packages is left alone
