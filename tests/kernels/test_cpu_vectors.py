"""The vector instructions of compiled CPU steps, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lookfar.core.arrays import Floats
from lookfar.core.jit import jit
from lookfar.kernels.cpu.decoder import most_likely
from lookfar.kernels.cpu.tiles import tile, tile_strided
from lookfar.kernels.cpu.vectors import LANES, TILE_ROWS, gated_silu, softmax, sum_of_squares


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@jit
def run_tile(rows, x, w, y, length, x_step, add):  # type: ignore[no-untyped-def]
    tile(rows, x.ctypes.data, w.ctypes.data, y.ctypes.data, length, x_step, LANES, LANES, add)


@jit
def run_tile_strided(rows, x, w, y, length, x_step):  # type: ignore[no-untyped-def]
    tile_strided(rows, x.ctypes.data, w.ctypes.data, y.ctypes.data, length, x_step, LANES, LANES, 0)


@jit
def run_softmax(scores, sums):  # type: ignore[no-untyped-def]
    softmax(scores.ctypes.data, len(scores), sums.ctypes.data)


@jit
def run_silu(gate, up):  # type: ignore[no-untyped-def]
    gated_silu(gate.ctypes.data, up.ctypes.data, len(gate))


@jit
def run_squares(values):  # type: ignore[no-untyped-def]
    return sum_of_squares(values.ctypes.data, len(values) // LANES)


@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("length", [1, 7, 64])
def test_tiles(rows: int, length: int) -> None:
    x, w, before = normal(rows, length), normal(length, LANES, seed=1), normal(rows, LANES, seed=2)
    expected = x.astype(np.float64) @ w
    in_blocks = np.ascontiguousarray(x.T)
    y = before.copy()
    run_tile(rows, in_blocks, w, y, length, rows, 0)
    assert np.allclose(y, expected, atol=1e-5)
    y = before.copy()
    run_tile(rows, in_blocks, w, y, length, rows, 1)
    assert np.allclose(y, before + expected, atol=1e-5)
    y = before.copy()
    run_tile_strided(rows, x, w, y, length, length)
    assert np.allclose(y, expected, atol=1e-5)


def test_softmax_leaves_out_what_does_not_count() -> None:
    scores = 30 * normal(50, LANES)
    scores[np.random.default_rng(1).random(scores.shape) < 0.3] = -np.inf
    scores[0] = -300.0  # something counts in every lane
    expected = torch.softmax(torch.from_numpy(scores).double(), 0).numpy()
    counts, sums = scores > -np.inf, np.zeros(LANES, np.float32)
    run_softmax(scores, sums)
    assert np.allclose(scores / sums, expected, rtol=1e-5, atol=1e-7)
    assert not scores[~counts].any()


@pytest.mark.parametrize("scale", [1.0, 40.0, 1000.0])
def test_silu(scale: float) -> None:
    gate, up = scale * normal(9, LANES), normal(9, LANES, seed=1)
    expected = (torch.nn.functional.silu(torch.from_numpy(gate).double()) * torch.from_numpy(up)).numpy()
    run_silu(gate, up)
    assert np.allclose(gate, expected, rtol=1e-5, atol=1e-6 * scale)


def test_squares() -> None:
    values = normal(160)
    assert run_squares(values) == pytest.approx(float((values.astype(np.float64) ** 2).sum()), rel=1e-6)


@pytest.mark.parametrize("kept", [1, 8, 300])
def test_the_most_likely_are_those_of_torch(kept: int) -> None:
    logits = np.round(normal(300), 1)  # with ties
    ids, values = np.full(kept, -1, np.int32), np.zeros(kept, np.float32)
    most_likely(logits, len(logits), ids, values, kept)
    expected = torch.from_numpy(logits).topk(kept).values.numpy()
    assert np.array_equal(values, expected)
    assert np.array_equal(logits[ids], expected)
    assert ids[0] == int(torch.from_numpy(logits).argmax())
    assert len(set(ids.tolist())) == kept


@pytest.mark.parametrize("places", [[5], [0, 7], [299]])
def test_a_nan_is_the_highest_as_in_torch(places: list[int]) -> None:
    logits = normal(300)
    logits[places] = np.nan
    ids, values = np.zeros(4, np.int32), np.zeros(4, np.float32)
    most_likely(logits, len(logits), ids, values, 4)
    found: Any = torch.from_numpy(logits).argmax()
    assert ids[0] == int(found)
