"""Keys and values put into their cells, accepted ones moved to where they belong, slots copied: one kernel each."""

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


@triton.jit(do_not_specialize=("source", "target", "cells"))
def copy(  # type: ignore[no-untyped-def]
    buffers, source, target, cells, slot_stride, head_stride, cell_stride, DIM: tl.constexpr, PAD: tl.constexpr,
    MOST: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    buffer = tl.load(buffers + tl.program_id(0)).to(tl.pointer_type(TYPE)) + tl.program_id(1) * head_stride
    cell, at = tl.program_id(2) * MOST + tl.arange(0, MOST), tl.arange(0, PAD)
    there = (cell < cells)[:, None] & (at < DIM)[None, :]
    place = cell[:, None] * cell_stride + at[None, :]
    copied = tl.load(buffer + source.to(tl.int64) * slot_stride + place, there)
    tl.store(buffer + target.to(tl.int64) * slot_stride + place, copied, there)


@triton.jit
def put(  # type: ignore[no-untyped-def]
    new_keys, new_values, keys, values, slots, cells, nk_head, nk_row, nv_head, nv_row, k_slot, k_head, k_cell, v_slot,
    v_head, v_cell, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    slot, cell = tl.load(slots + row), tl.load(cells + row)
    at = tl.arange(0, K_PAD)
    new = tl.load(new_keys + head * nk_head + row * nk_row + at, at < K_DIM)
    tl.store(keys + slot * k_slot + head * k_head + cell * k_cell + at, new, at < K_DIM)
    at = tl.arange(0, V_PAD)
    new = tl.load(new_values + head * nv_head + row * nv_row + at, at < V_DIM)
    tl.store(values + slot * v_slot + head * v_head + cell * v_cell + at, new, at < V_DIM)


def write_rows(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """Put each row's keys and values, [1, heads, rows, dim], into its cell."""
    new_keys, new_values = (x if x.stride(3) == 1 else x.contiguous() for x in (new_keys, new_values))
    _, heads, rows, k_dim = new_keys.shape
    v_dim = new_values.shape[3]
    put[(rows, heads)](
        new_keys, new_values, keys, values, slots, cells, *new_keys.stride()[1:3], *new_values.stride()[1:3],
        *keys.stride()[:3], *values.stride()[:3],
        K_DIM=k_dim, V_DIM=v_dim, K_PAD=triton.next_power_of_2(k_dim), V_PAD=triton.next_power_of_2(v_dim), num_warps=1,
    )  # fmt: skip


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

    def copy(self, source: int, target: int, cells: int) -> None:
        """Give a slot the first cells of another one."""
        for buffer, addresses in self.groups:
            _, heads, _, dim = buffer.shape
            with torch.cuda.device(buffer.device):
                copy[(len(addresses), heads, triton.cdiv(cells, NEAR))](
                    addresses, source, target, cells, *buffer.stride()[:3],
                    DIM=dim, PAD=triton.next_power_of_2(dim), MOST=NEAR, TYPE=TYPES[buffer.element_size()],
                )  # fmt: skip
