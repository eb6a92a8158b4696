"""Accepted rows of all layers moved to where they belong, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookfar.cache import SlotCache
from lookfar.gpu.table import NEAR

TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # bits are moved, whatever they mean


@triton.jit
def move(  # type: ignore[no-untyped-def]
    buffers, moves, slot_stride, head_stride, cell_stride, DIM: tl.constexpr, PAD: tl.constexpr, MOST: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    orders = moves + tl.program_id(2) * (1 + 2 * MOST)
    slot = tl.load(orders)
    if slot < 0:
        return
    each = tl.arange(0, MOST)
    source = tl.load(orders + 1 + each)
    target = tl.load(orders + 1 + MOST + each)
    at = tl.arange(0, PAD)
    there = (source >= 0)[:, None] & (at < DIM)[None, :]
    buffer = tl.load(buffers + tl.program_id(0)).to(tl.pointer_type(TYPE))
    buffer += slot.to(tl.int64) * slot_stride + tl.program_id(1) * head_stride
    cells = tl.load(buffer + source[:, None] * cell_stride + at[None, :], there, 0)
    tl.debug_barrier()  # a cell may be read from and written to: all is read first
    tl.store(buffer + target[:, None] * cell_stride + at[None, :], cells, there)


class Mover:
    """Buffers of one shape share a launch."""

    def __init__(self, cache: SlotCache) -> None:
        groups: dict[tuple[object, ...], list[torch.Tensor]] = {}
        for layer in cache.layers:
            if layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    groups.setdefault((buffer.shape, buffer.stride(), buffer.element_size()), []).append(buffer)
        self.groups = [
            (buffers[0], torch.tensor([b.data_ptr() for b in buffers], device=buffers[0].device))
            for buffers in groups.values()
        ]

    def __call__(self, moves: torch.Tensor) -> None:
        """Do the moves of every sequence: [sequences, slot and `NEAR` cells to read and to write], -1 for none."""
        for buffer, addresses in self.groups:
            _, heads, _, dim = buffer.shape
            move[(len(addresses), heads, len(moves))](
                addresses, moves, *buffer.stride()[:3],
                DIM=dim, PAD=triton.next_power_of_2(dim), MOST=NEAR, TYPE=TYPES[buffer.element_size()],
            )  # fmt: skip
