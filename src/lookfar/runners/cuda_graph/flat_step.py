"""A flat step: a fixed number of rows, side by side, of at most a fixed number of requests, in buffers that stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from lookfar.core.plan import StepPlan
from lookfar.kernels.blas_library import CUBLASLT_ROWS, blas_library
from lookfar.kernels.row_table import (
    KV_POSITIONS,
    MAX_PATH,
    POSITIONS,
    SLOTS,
    TOKENS,
    WIDTH,
    RowTable,
    max_tiles,
    step_arrays,
)
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel, FlatRows
from lookfar.runners.flat_writer import FlatWriter

Forward = Callable[..., Any]


class FlatStep:
    """The buffers of steps of one shape. Everything that changes from step to step is in one block of memory."""

    def __init__(self, model: BoundModel, cache: SlotKVCache, rows: int, batch: int) -> None:
        self.model, self.cache = model, cache
        self.rows, self.batch = rows, batch
        self.on_gpu = model.device.type == "cuda"
        kinds = list(model.support.kinds.values())
        shapes = ((4, rows), (len(kinds), rows + max_tiles(rows, batch), WIDTH), (batch, 1 + 2 * MAX_PATH))
        numbers = 4 * rows + (shapes[1][0] * shapes[1][1] * WIDTH + batch * shapes[2][1] + 1) // 2
        self.host = torch.zeros(numbers, dtype=torch.int64, pin_memory=self.on_gpu)
        self.device = torch.zeros(numbers, dtype=torch.int64, device=model.device) if self.on_gpu else self.host
        inputs, tables, moves = (part.numpy() for part in _split(self.host, shapes))
        arrays = step_arrays(inputs, tables, [(kind.window or 0, kind.chunk or 0) for kind in kinds])
        self.table = RowTable(arrays, spare=cache.capacity)
        self.host_moves = moves
        self.inputs, tables_on_device, self.moves = _split(self.device, shapes)
        self.flat_rows = FlatRows(self.inputs[TOKENS], self.inputs[POSITIONS], tables_on_device)
        self.writer = FlatWriter(cache.buffers, self.inputs[SLOTS], self.inputs[KV_POSITIONS])

    def fill(self, plan: StepPlan) -> bool:
        """Write a step into the host's block; False if a row table cannot describe it."""
        filled = self.table.fill(plan, [self.cache.slot_of(handle) for handle in plan.handles])
        last = self.model.support.max_positions
        if last is not None and plan.has_windows:
            # Only window rows can point past the last position, and what they compute there is never used.
            positions = self.table.arrays.inputs[POSITIONS]
            np.minimum(positions, last - 1, out=positions)
        if plan.position_offsets.any():
            rows = np.repeat(plan.position_offsets, plan.lengths)
            self.table.arrays.inputs[POSITIONS, : len(rows)] += rows
        return filled

    def clear(self) -> None:
        """Fill in a step of nothing but padding."""
        self.table.clear()

    def forward(self, forward: Forward) -> torch.Tensor:
        """Return the logits of all rows, [rows, vocabulary]."""
        library = "cublaslt" if self.rows in CUBLASLT_ROWS else "cublas"
        with blas_library(library) if self.on_gpu else nullcontext():
            return self.model.forward_flat(self.flat_rows, self.writer, forward)


def _split(block: torch.Tensor, shapes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the inputs, the row tables and the moves in a block of 64-bit numbers."""
    first, second, third = (int(np.prod(shape)) for shape in shapes)
    small = block[first:].view(torch.int32)
    return (
        block[:first].view(shapes[0]),
        small[:second].view(shapes[1]),
        small[second : second + third].view(shapes[2]),
    )
