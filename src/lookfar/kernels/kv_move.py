"""KV cache kernels: write the rows of a step, move accepted rows to their positions, copy a slot or a part of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import numpy as np
import torch
import triton
import triton.language as tl

from lookfar.core.packed_kv import PackedKV, alike
from lookfar.kernels.overlap import launch_options, wait
from lookfar.kernels.row_table import MAX_PATH

TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # bits are moved, whatever their type
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def move_positions(  # type: ignore[no-untyped-def]
    buffers, moves, slot_stride, head_stride, position_stride, DIM: tl.constexpr, PAD: tl.constexpr, MOST: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    own_moves = moves + tl.program_id(2) * (1 + 2 * MOST)
    slot = tl.load(own_moves)
    if slot < 0:
        return
    each = tl.arange(0, MOST)
    source = tl.load(own_moves + 1 + each)
    target = tl.load(own_moves + 1 + MOST + each)
    at = tl.arange(0, PAD)
    there = (source >= 0)[:, None] & (at < DIM)[None, :]
    buffer = tl.load(buffers + tl.program_id(0)).to(tl.pointer_type(TYPE))
    buffer += slot.to(tl.int64) * slot_stride + tl.program_id(1) * head_stride
    moved = tl.load(buffer + source[:, None] * position_stride + at[None, :], there, 0)
    tl.debug_barrier()  # a position may be both source and target: everything is read first
    tl.store(buffer + target[:, None] * position_stride + at[None, :], moved, there)


@triton.jit(do_not_specialize=("source", "target", "length"))
def copy_positions(  # type: ignore[no-untyped-def]
    buffers, source, target, length, slot_stride, head_stride, position_stride, DIM: tl.constexpr, PAD: tl.constexpr,
    MOST: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    buffer = tl.load(buffers + tl.program_id(0)).to(tl.pointer_type(TYPE)) + tl.program_id(1) * head_stride
    position, at = tl.program_id(2) * MOST + tl.arange(0, MOST), tl.arange(0, PAD)
    there = (position < length)[:, None] & (at < DIM)[None, :]
    place = position[:, None] * position_stride + at[None, :]
    copied = tl.load(buffer + source.to(tl.int64) * slot_stride + place, there)
    tl.store(buffer + target.to(tl.int64) * slot_stride + place, copied, there)


@triton.jit(do_not_specialize=("slot", "start", "length", "block_buffer", "block_head", "block_position"))
def pack_positions(  # type: ignore[no-untyped-def]
    buffers, block, slot, start, length, block_buffer, block_head, block_position, slot_stride, head_stride,
    position_stride, DIM: tl.constexpr, PAD: tl.constexpr, MOST: tl.constexpr, TYPE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    buffer = tl.load(buffers + tl.program_id(0)).to(tl.pointer_type(TYPE)) + tl.program_id(1) * head_stride
    buffer += slot.to(tl.int64) * slot_stride + start.to(tl.int64) * position_stride
    block += tl.program_id(0).to(tl.int64) * block_buffer + tl.program_id(1) * block_head
    position, at = tl.program_id(2) * MOST + tl.arange(0, MOST), tl.arange(0, PAD)
    there = (position < length)[:, None] & (at < DIM)[None, :]
    inside = buffer + position[:, None] * position_stride + at[None, :]
    outside = block + position[:, None] * block_position + at[None, :]
    if OUT:
        tl.store(outside, tl.load(inside, there), there)
    else:
        tl.store(inside, tl.load(outside, there), there)


@triton.jit
def write_positions(  # type: ignore[no-untyped-def]
    new_keys, new_values, keys, values, slots, positions, nk_head, nk_row, nv_head, nv_row, k_slot, k_head, k_position,
    v_slot, v_head, v_position, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait(OVERLAPS)
    row, head = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    at = tl.arange(0, K_PAD)
    new = tl.load(new_keys + head * nk_head + row * nk_row + at, at < K_DIM)
    tl.store(keys + slot * k_slot + head * k_head + position * k_position + at, new, at < K_DIM)
    at = tl.arange(0, V_PAD)
    new = tl.load(new_values + head * nv_head + row * nv_row + at, at < V_DIM)
    tl.store(values + slot * v_slot + head * v_head + position * v_position + at, new, at < V_DIM)


def write_rows(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write each row's keys and values, [1, heads, rows, dim], to its slot and position."""
    new_keys, new_values = (x if x.stride(3) == 1 else x.contiguous() for x in (new_keys, new_values))
    _, heads, rows, k_dim = new_keys.shape
    v_dim = new_values.shape[3]
    write_positions[(rows, heads)](
        new_keys, new_values, keys, values, slots, positions, *new_keys.stride()[1:3], *new_values.stride()[1:3],
        *keys.stride()[:3], *values.stride()[:3],
        K_DIM=k_dim, V_DIM=v_dim, K_PAD=triton.next_power_of_2(k_dim), V_PAD=triton.next_power_of_2(v_dim), num_warps=1,
        **launch_options(keys.device),
    )  # fmt: skip


class KVMover:
    """Moves and copies positions in all buffers of a KV cache. Buffers of one shape share a launch."""

    def __init__(self, buffers: Seq[torch.Tensor]) -> None:
        self.groups = [
            (group[0], torch.tensor([b.data_ptr() for b in group], device=group[0].device)) for group in alike(buffers)
        ]

    def move(self, moves: torch.Tensor) -> None:
        """Carry out moves: [requests, 1 + 2 × MAX_PATH] a slot, positions to read and to write; -1 for none."""
        for buffer, addresses in self.groups:
            _, heads, _, dim = buffer.shape
            move_positions[(len(addresses), heads, len(moves))](
                addresses, moves, *buffer.stride()[:3],
                DIM=dim, PAD=triton.next_power_of_2(dim), MOST=MAX_PATH, TYPE=TYPES[buffer.element_size()],
            )  # fmt: skip

    def apply(self, moves: Mapping[int, tuple[Seq[int], Seq[int]]]) -> None:
        """Carry out moves that the host has noted: by slot, positions to move, ascending, and where to."""
        longest = max(len(sources) for sources, _ in moves.values())
        for start in range(0, longest, MAX_PATH):  # positions move downwards: later parts are still there
            table = np.full((len(moves), 1 + 2 * MAX_PATH), -1, np.int32)
            for own, (slot, (sources, targets)) in zip(table, moves.items(), strict=True):
                part = list(sources[start : start + MAX_PATH]), list(targets[start : start + MAX_PATH])
                own[0], own[1 : 1 + len(part[0])], own[1 + MAX_PATH : 1 + MAX_PATH + len(part[1])] = slot, *part
            with torch.cuda.device(self.groups[0][0].device):
                self.move(torch.from_numpy(table).to(self.groups[0][0].device))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another one."""
        for buffer, addresses in self.groups:
            _, heads, _, dim = buffer.shape
            with torch.cuda.device(buffer.device):
                copy_positions[(len(addresses), heads, triton.cdiv(length, MAX_PATH))](
                    addresses, source, target, length, *buffer.stride()[:3],
                    DIM=dim, PAD=triton.next_power_of_2(dim), MOST=MAX_PATH, TYPE=TYPES[buffer.element_size()],
                )  # fmt: skip

    def pack(self, slot: int, start: int, end: int) -> PackedKV:
        """Copy positions out of a slot."""
        blocks = tuple(
            torch.empty(len(addresses), like.shape[1], end - start, like.shape[3], dtype=like.dtype, device=like.device)
            for like, addresses in self.groups
        )
        self._pack(PackedKV(blocks, end - start), slot, start, out=True)
        return PackedKV(blocks, end - start)

    def unpack(self, slot: int, kv: PackedKV) -> None:
        """Copy KV into the first positions of a slot."""
        self._pack(kv, slot, 0, out=False)

    def _pack(self, kv: PackedKV, slot: int, start: int, out: bool) -> None:
        """Copy between a slot and packed KV."""
        for (buffer, addresses), block in zip(self.groups, kv.blocks, strict=True):
            _, heads, _, dim = buffer.shape
            bits = block.view(INTEGERS[block.element_size()])
            with torch.cuda.device(buffer.device):
                pack_positions[(len(addresses), heads, triton.cdiv(kv.length, MAX_PATH))](
                    addresses, bits, slot, start, kv.length, *bits.stride()[:3], *buffer.stride()[:3],
                    DIM=dim, PAD=triton.next_power_of_2(dim), MOST=MAX_PATH, TYPE=TYPES[buffer.element_size()], OUT=out,
                )  # fmt: skip
