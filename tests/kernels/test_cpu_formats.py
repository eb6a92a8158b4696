"""The formats of packed weights: which one is chosen, and that none changes a bit of a product."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lookfar.core.arrays import Floats
from lookfar.core.jit import jit
from lookfar.kernels.cpu.blocks import multiply_tile
from lookfar.kernels.cpu.formats import Bytes, format_of, packed_size, panel_size, write_panels
from lookfar.kernels.cpu.tiles import BFLOAT16, FLOAT16, FLOAT32, GROUP, UINT8
from lookfar.kernels.cpu.vectors import LANES, TILE_ROWS
from lookfar.models.packed_matrix import aligned

LENGTH = 3 * GROUP


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def quantised(levels: int, symmetric: bool, seed: int = 0) -> torch.Tensor:
    """Return a matrix as a GGUF file holds it: half-precision scales, and offsets unless it is symmetric."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, levels, (48, LENGTH // GROUP, GROUP))
    scales = random.normal(size=(48, LENGTH // GROUP, 1)).astype(np.float16).astype(np.float32)
    offsets = random.normal(size=scales.shape).astype(np.float16).astype(np.float32)
    values = scales * (numbers - levels // 2) if symmetric else scales * numbers + offsets
    return torch.from_numpy(values.astype(np.float32).reshape(48, LENGTH))


MATRICES = {
    "normal numbers": (normal(48, LENGTH), FLOAT32),
    "of a bfloat16 checkpoint": (normal(48, LENGTH).bfloat16().float(), BFLOAT16),
    "of a float16 checkpoint": (normal(48, LENGTH).half().float(), FLOAT16),
    "four bits": (quantised(16, True), UINT8),
    "four bits with offsets": (quantised(16, False), UINT8),
    "eight bits": (quantised(255, True), UINT8),
    "zeros": (torch.zeros(48, LENGTH), UINT8),
    "ones": (torch.ones(48, LENGTH), UINT8),
    "one row is not": (torch.cat([quantised(16, True)[:-1], normal(1, LENGTH)]), FLOAT32),
    "NaN": (torch.full((48, LENGTH), torch.nan), BFLOAT16),
    "a NaN in every row": (torch.zeros(48, LENGTH).where(torch.arange(LENGTH) != 7, torch.nan), BFLOAT16),
    "infinity": (torch.full((48, LENGTH), torch.inf), BFLOAT16),
    "no whole groups": (torch.ones(48, GROUP + 16), BFLOAT16),
    "fewer rows than a panel": (quantised(16, True)[:5], UINT8),
}


def packed(weight: torch.Tensor, kind: int) -> Bytes | None:
    memory = aligned(packed_size(weight, kind))
    memory[:] = 0xAA  # what was there before does not matter
    return memory if write_panels(weight, kind, memory) else None


@jit
def run_tile(kind, rows, x, panel, y, length):  # type: ignore[no-untyped-def]
    multiply_tile(kind, rows, x.ctypes.data, panel.ctypes.data, y.ctypes.data, length, rows, LANES, LANES, 0)


def product(weight: torch.Tensor, kind: int, rows: int) -> Floats:
    """Multiply `rows` rows with all panels of a weight."""
    memory, length = packed(weight, kind), weight.shape[1]
    assert memory is not None
    size = int(panel_size(kind, length))
    x = np.ascontiguousarray(normal(rows, length).numpy().T)
    found = []
    for first in range(0, len(memory), size):
        found.append(np.zeros((rows, LANES), np.float32))
        run_tile(kind, rows, x, memory[first : first + size], found[-1], length)
    return np.concatenate(found, 1)


@pytest.mark.parametrize("name", MATRICES)
def test_the_smallest_format_that_fits(name: str) -> None:
    weight, kind = MATRICES[name]
    assert format_of([weight]) == kind


@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("name", [name for name, (_, kind) in MATRICES.items() if kind != FLOAT32])
def test_products_have_the_bits_of_float32(name: str, rows: int) -> None:
    weight, kind = MATRICES[name]
    expected, found = product(weight, FLOAT32, rows), product(weight, kind, rows)
    assert np.array_equal(expected, found, equal_nan=True)
    assert not found[:, len(weight) :].any()  # the last panel is filled up with zeros


@pytest.mark.parametrize("kind", [UINT8, BFLOAT16, FLOAT16, FLOAT32])
def test_weights_need_not_be_contiguous(kind: int) -> None:
    weight = quantised(16, True).half().float().t().contiguous().t() if kind == FLOAT16 else torch.ones(LENGTH, 48).t()
    assert not weight.is_contiguous()
    found = packed(weight, kind)
    whole = packed(weight.contiguous(), kind)
    assert found is not None
    assert np.array_equal(found, whole)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the names are those of x86 processors")
def test_processors_without_float16() -> None:
    """Code for a plainer processor is compiled and runs, whatever this one can do."""
    program = """
from lookfar.kernels.cpu.formats import FORMATS
from lookfar.kernels.cpu.tiles import FLOAT16
import lookfar
from families import tiny_model
from helpers import reference
import torch
assert FLOAT16 not in FORMATS
model = tiny_model("llama", torch.float32)
lm = lookfar.LM(model, pack=True)
assert lm.generate([1, 2, 3], max_new_tokens=8).token_ids == reference(model, [1, 2, 3], 8)
print(lm.engine.runner.name)
"""
    features = "+sse4.2,+fma,+avx,+avx2"
    where = {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **where})
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == ["compiled"]


def test_matrices_of_one_product_share_a_format() -> None:
    bfloat16, float16, small = (
        MATRICES[name][0] for name in ("of a bfloat16 checkpoint", "of a float16 checkpoint", "eight bits")
    )
    assert format_of([small, small]) == UINT8
    assert format_of([small, float16]) == FLOAT32  # products of scales and eight bits do not fit float16
    assert format_of([bfloat16, float16]) == FLOAT16
    assert format_of([1e-20 * bfloat16, float16]) == FLOAT32


@pytest.mark.parametrize("kind", [UINT8, BFLOAT16, FLOAT16])
def test_a_matrix_that_does_not_fit_is_refused(kind: int) -> None:
    assert packed(MATRICES["one row is not"][0], kind) is None
    assert packed(MATRICES["normal numbers"][0], kind) is None


@given(st.integers(1, 400), st.floats(2.0**-90, 2.0**90, width=32), st.floats(-(2.0**90), 2.0**90, width=32), st.data())
def test_whatever_is_packed_is_read_again(levels: int, unit: float, offset: float, data: Any) -> None:
    numbers = data.draw(st.lists(st.integers(0, levels), min_size=GROUP, max_size=GROUP))
    values = np.float32(offset) + np.float32(unit) * np.array(numbers, np.float32)
    weight = torch.from_numpy(values[None].repeat(LANES, 0))
    kind = format_of([weight])
    x = np.eye(GROUP, dtype=np.float32)
    memory, found = packed(weight, kind), np.zeros((GROUP, LANES), np.float32)
    assert memory is not None
    for first in range(0, GROUP, 4):  # four rows with a single 1 each
        run_tile(kind, 4, np.ascontiguousarray(x[first : first + 4].T), memory, found[first : first + 4], GROUP)
    assert np.array_equal(found, weight.numpy().T)


def test_sampled_rows_decide_beforehand() -> None:
    weight = MATRICES["one row is not"][0]
    assert format_of([weight[:47]], rows=4) == UINT8
    assert format_of([weight], rows=48) == FLOAT32
