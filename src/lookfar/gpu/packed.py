"""One shape of step: so many rows, side by side, of at most so many sequences, in buffers that stay where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import Cache

from lookfar.cache import SlotCache
from lookfar.gpu.table import CELLS, NEAR, POSITIONS, SLOTS, TOKENS, WIDTH, fill, tiles_for
from lookfar.model import BoundModel
from lookfar.tree import Plan

Forward = Callable[..., Any]

FASTER_WITH_LT = (32, 64)  # rows that cuBLASLt multiplies faster than cuBLAS


class PackedCache(Cache):
    """A slot cache as packed rows use it: each row writes to a cell of its own, and attention gets whole buffers."""

    def __init__(self, cache: SlotCache, slots: torch.Tensor, cells: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self.slots, self.cells = slots, cells
        self.now: tuple[Any, Any] = None, None  # the buffers of the layer whose turn it is

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():
            self.turn_of(layer_idx, key_states, value_states)
        keys, values = self.now
        if keys.device.type == "cuda" and not torch.compiler.is_compiling():  # a compiler fuses it with what is before
            from lookfar.gpu.moving import write_rows

            write_rows(key_states, value_states, keys, values, self.slots, self.cells)
        else:
            keys[self.slots, :, self.cells] = key_states[0].transpose(0, 1)
            values[self.slots, :, self.cells] = value_states[0].transpose(0, 1)
        return keys, values

    def turn_of(self, layer_idx: int, key_states: Any = None, value_states: Any = None) -> None:
        """The next update is this layer's."""
        layer = self.cache.layer(layer_idx)
        if key_states is not None and not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        self.now = layer.keys, layer.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and tables say where a row is


class PackedStep:
    """Buffers for steps of one shape. Everything that changes from step to step is in one block of memory."""

    def __init__(self, model: BoundModel, cache: SlotCache, rows: int, batch: int) -> None:
        self.model, self.cache = model, cache
        self.rows, self.batch = rows, batch
        kinds = list(model.support.kinds.values())
        self.windows = np.array([[kind.window or 0, kind.chunk or 0] for kind in kinds], np.int32)
        device, on_gpu = model.device, model.device.type == "cuda"
        self.on_gpu = on_gpu
        shapes = ((4, rows), (len(kinds), rows + tiles_for(rows, batch), WIDTH), (batch, 1 + 2 * NEAR))
        numbers = 4 * rows + (shapes[1][0] * shapes[1][1] * WIDTH + batch * shapes[2][1] + 1) // 2
        self.host = torch.zeros(numbers, dtype=torch.int64, pin_memory=on_gpu)
        self.device = torch.zeros(numbers, dtype=torch.int64, device=device) if on_gpu else self.host
        inputs, tables, moves = (part.numpy() for part in _parts(self.host, shapes))
        self.host_inputs, self.host_tables, self.host_moves = inputs, tables, moves
        self.inputs, self.tables, self.moves = _parts(self.device, shapes)
        self.packed = PackedCache(cache, self.inputs[SLOTS], self.inputs[CELLS])

    def fill(self, plan: Plan) -> bool:
        """Write a step into the host's block; False if it cannot be told there."""
        told = fill(
            plan.sequences, plan.first_slot, self.host_inputs, self.host_tables, self.windows, self.cache.capacity
        )
        last = self.model.support.max_positions
        if last is not None and any(rows.riders for rows in plan.sequences):
            # Only riders can point past the last position, and what they bring there is never used.
            np.minimum(self.host_inputs[POSITIONS], last - 1, out=self.host_inputs[POSITIONS])
        return told

    def clear(self) -> None:
        """A step of nothing but padding, for trying it out."""
        fill([], 0, self.host_inputs, self.host_tables, self.windows, self.cache.capacity)

    def forward(self, forward: Forward) -> torch.Tensor:
        """The logits of all rows, [rows, vocabulary]."""
        tokens, positions = self.inputs[TOKENS], self.inputs[POSITIONS]
        with _multiplying(self.rows) if self.on_gpu else nullcontext():
            return self.model.forward_packed(tokens[None], positions[None], self.tables, self.packed, forward)


@contextmanager
def _multiplying(rows: int) -> Iterator[None]:
    """With the library that is faster for so many rows (measured on an H200, docs/benchmarks.md)."""
    _be_told()
    usual = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt" if rows in FASTER_WITH_LT else "cublas")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(usual)


@cache
def _be_told() -> None:
    """Torch says once that choosing a library is experimental, on standard error and past Python's warnings.

    That would stand in the middle of somebody's output, so it is said where nobody listens.
    """
    usual = torch.backends.cuda.preferred_blas_library()
    with suppress(OSError), open(os.devnull, "w") as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            torch.backends.cuda.preferred_blas_library("cublaslt")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            torch.backends.cuda.preferred_blas_library(usual)


def _parts(block: torch.Tensor, shapes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs, the tables and the moves in a block of 64-bit numbers."""
    first, second, third = (int(np.prod(shape)) for shape in shapes)
    small = block[first:].view(torch.int32)
    return (
        block[:first].view(shapes[0]),
        small[:second].view(shapes[1]),
        small[second : second + third].view(shapes[2]),
    )
