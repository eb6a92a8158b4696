"""Compiled host code is kept in our cache directory, or nowhere; that is never an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest

import lookfar
from families import tiny_model
from lookfar.core.jit import jit
from lookfar.errors import ConfigError

SCRIPT = """
import numpy as np
from lookfar.core.jit import jit
from lookfar.retrieval.recycle_table import RecycleTable, find_pair
print(find_pair(RecycleTable(9, 4).arrays.pair_keys, 1, 2))
print(find_pair.stats.cache_hits.total(), find_pair.stats.cache_misses.total())
"""


def double(x):  # type: ignore[no-untyped-def]
    return 2 * x


def start(cache: Path, before: Callable[[], Any] | None = None) -> subprocess.Popen[str]:
    environment = os.environ | {"LOOKFAR_CACHE": str(cache)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=pipe, stderr=pipe, text=True, env=environment, preexec_fn=before
    )


def hits_and_misses(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found, counts = out.splitlines()
    assert found == "-1"
    assert err == ""
    return counts


def test_without_a_place_to_write_to_code_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert jit(double)(4) == 8


def test_a_directory_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.core.jit.compiled_dir", lambda: tmp_path / "compiled")
    compiled = jit(double)
    (tmp_path / "compiled").rename(tmp_path / "elsewhere") if (tmp_path / "compiled").exists() else None
    assert compiled(4) == 8
    monkeypatch.setattr("lookfar.core.jit_cache.replace_file", full_disk)
    assert compiled(4.5) == 9


def full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_compiled_code_is_used_again_and_garbage_is_not(tmp_path: Path) -> None:
    assert hits_and_misses(start(tmp_path)) == "0 1"
    assert hits_and_misses(start(tmp_path)) == "1 0"
    assert not numba.config.CACHE_DIR  # the setting of other packages is left alone
    file = next((tmp_path / "compiled").rglob("*.find_pair-*"))
    contents = file.read_bytes()
    flipped = bytearray(contents)
    flipped[len(contents) // 2] ^= 255
    for damaged in (b"", b"garbage", contents[:-100], bytes(flipped)):
        file.write_bytes(damaged)
        assert hits_and_misses(start(tmp_path)) == "0 1"
        assert hits_and_misses(start(tmp_path)) == "1 0"  # it was repaired


@pytest.mark.slow
def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    together = [start(tmp_path) for _ in range(4)]
    for process in together:
        hits_and_misses(process)
    assert hits_and_misses(start(tmp_path)) == "1 0"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk(tmp_path: Path) -> None:
    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    assert hits_and_misses(start(tmp_path, limit)) == "0 1"
    assert not [file for file in (tmp_path / "compiled").rglob("*") if file.is_file()]


def test_without_the_compiler_a_model_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set, .* unset it"):
        lookfar.LM(tiny_model("llama"))
