"""Tree attention in Triton: many rows, each with a path of its own, against cached keys and values.

Two kernels. The first attends from tiles of rows to the keys that lie far behind all of them, which rows of one
sequence share; the keys are split over programs. The second goes on, for each row alone, with the last 33 to 64 keys of
its own path, gathered in their order, and adds both up.

Where the two meet, which keys make a block, and in which order blocks are added depends on the position of a row and on
nothing else. So the result of a row does not depend, to the last bit, on what else is fed or guessed beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lookfar.gpu.table import (
    DIRECT,
    LOW,
    NEAR,
    PATH,
    SEEN,
    SLOT,
    TILE_FIRST,
    TILE_LOW,
    TILE_ROWS,
    TILE_SEEN,
    TILE_SIZE,
    TILE_SLOT,
)

CHUNK = 128  # keys of one program at the beginning of a text
# The first chunks are that small, so that short texts keep many programs busy, the next ones twice as large, and all
# others eight times: sums over very many chunks would cost more than the keys.
SMALL, MIDDLE = tl.constexpr(16), tl.constexpr(24)
UNROLL = 4  # chunks fetched at once


@triton.jit
def chunk_start(chunk, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    middle = SMALL * CHUNK + (chunk - SMALL) * (2 * CHUNK)
    large = (SMALL + 2 * MIDDLE) * CHUNK + (chunk - SMALL - MIDDLE) * (8 * CHUNK)
    return tl.where(chunk < SMALL, chunk * CHUNK, tl.where(chunk < SMALL + MIDDLE, middle, large))


@triton.jit
def chunk_of(key, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    middle = SMALL + (key - SMALL * CHUNK) // (2 * CHUNK)
    large = SMALL + MIDDLE + (key - (SMALL + 2 * MIDDLE) * CHUNK) // (8 * CHUNK)
    return tl.where(key < SMALL * CHUNK, key // CHUNK, tl.where(key < (SMALL + 2 * MIDDLE) * CHUNK, middle, large))


@triton.jit
def scores_of(q, k, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """In powers of two, which are cheaper to take."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634) / softcap) + 1.0))
    return scores * 1.4426950408889634


@triton.jit
def fold(scores, v, top, total, mixed):  # type: ignore[no-untyped-def]
    """One more block of keys into a running softmax; a block without a visible key changes nothing."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def shared_keys(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    table,
    mixed_out,
    top_out,
    total_out,
    scale,
    softcap,
    q_head,
    q_row,
    k_slot,
    k_head,
    k_cell,
    v_slot,
    v_head,
    v_cell,
    rows,
    heads,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    NEAR: tl.constexpr,
    SEEN: tl.constexpr,
    LOW: tl.constexpr,
    TILE_FIRST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_SLOT: tl.constexpr,
    TILE_SEEN: tl.constexpr,
    TILE_LOW: tl.constexpr,
):
    """A tile of rows of one sequence against one chunk of the keys that all of them have far behind."""
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    about = table + (rows + tile) * WIDTH
    first = tl.load(about + TILE_FIRST)
    count = tl.load(about + TILE_ROWS)
    slot = tl.load(about + TILE_SLOT).to(tl.int64)
    last = tl.maximum((tl.load(about + TILE_SEEN) - 1) // NEAR - 1, 0) * NEAR
    lowest = tl.load(about + TILE_LOW)
    begin = chunk_start(chunk, CHUNK)
    if (begin >= last) | (part * TILE >= count * GROUP):
        return
    end = tl.minimum(chunk_start(chunk + 1, CHUNK), last)
    begin = tl.maximum(begin, lowest // BLOCK * BLOCK)
    entry = part * TILE + tl.arange(0, TILE)
    valid = entry < count * GROUP
    row = first + entry // GROUP
    head = kv_head * GROUP + entry % GROUP
    seen = tl.load(table + row * WIDTH + SEEN, valid, 0)
    low = tl.load(table + row * WIDTH + LOW, valid, 0)
    far = tl.maximum((seen - 1) // NEAR - 1, 0) * NEAR
    k_at = tl.arange(0, K_PAD)
    v_at = tl.arange(0, V_PAD)
    queries = tl.load(
        q + head[:, None] * q_head + row[:, None] * q_row + k_at[None, :], valid[:, None] & (k_at < K_DIM)[None, :], 0.0
    )
    keys = k + slot * k_slot + kv_head * k_head
    values = v + slot * v_slot + kv_head * v_head
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, V_PAD], tl.float32)
    for block in range(begin, end, BLOCK):
        key = block + tl.arange(0, BLOCK)
        there = (key < end)[:, None]
        k_block = tl.load(keys + key[:, None] * k_cell + k_at[None, :], there & (k_at < K_DIM)[None, :], 0.0)
        v_block = tl.load(values + key[:, None] * v_cell + v_at[None, :], there & (v_at < V_DIM)[None, :], 0.0)
        scores = scores_of(queries, k_block, scale, softcap, CAPPED)
        sees = (key[None, :] < far[:, None]) & (key[None, :] >= low[:, None]) & (key < end)[None, :]
        top, total, mixed = fold(tl.where(sees, scores, float("-inf")), v_block, top, total, mixed)
    place = (chunk * rows + row).to(tl.int64) * heads + head
    tl.store(top_out + place, top, valid)
    tl.store(total_out + place, total, valid)
    tl.store(mixed_out + place[:, None] * V_DIM + v_at[None, :], mixed, valid[:, None] & (v_at < V_DIM)[None, :])


@triton.jit
def own_keys(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    table,
    mixed_in,
    top_in,
    total_in,
    sinks,
    out,
    scale,
    softcap,
    q_head,
    q_row,
    k_slot,
    k_head,
    k_cell,
    v_slot,
    v_head,
    v_cell,
    rows,
    heads,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    UNROLL: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NEAR: tl.constexpr,
    SLOT: tl.constexpr,
    DIRECT: tl.constexpr,
    SEEN: tl.constexpr,
    LOW: tl.constexpr,
    PATH: tl.constexpr,
):
    """One row: what the chunks of far keys came to, then the keys at the end of its path."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    about = table + row * WIDTH
    seen = tl.load(about + SEEN)
    member = tl.arange(0, GROUP_PAD)
    valid = member < GROUP
    head = kv_head * GROUP + member
    k_at = tl.arange(0, K_PAD)
    v_at = tl.arange(0, V_PAD)
    to = out + (row * heads + head)[:, None] * V_DIM + v_at[None, :]
    fits = valid[:, None] & (v_at < V_DIM)[None, :]
    if seen == 0:  # padding
        tl.store(to, tl.zeros([GROUP_PAD, V_PAD], tl.float32), fits)
        return
    low = tl.load(about + LOW)
    direct = tl.load(about + DIRECT)
    slot = tl.load(about + SLOT).to(tl.int64)
    far = tl.maximum((seen - 1) // NEAR - 1, 0) * NEAR

    key = far + tl.arange(0, 2 * NEAR)
    cell = tl.load(about + PATH + key - direct, (key >= direct) & (key < seen), 0)
    cell = tl.where(key < direct, key, cell)
    there = (key < seen)[:, None]
    keys = k + slot * k_slot + kv_head * k_head
    values = v + slot * v_slot + kv_head * v_head
    queries = tl.load(
        q + head[:, None] * q_head + row * q_row + k_at[None, :], valid[:, None] & (k_at < K_DIM)[None, :], 0.0
    )
    k_block = tl.load(keys + cell[:, None] * k_cell + k_at[None, :], there & (k_at < K_DIM)[None, :], 0.0)
    v_block = tl.load(values + cell[:, None] * v_cell + v_at[None, :], there & (v_at < V_DIM)[None, :], 0.0)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, V_PAD], tl.float32)
    if far > low:
        end = chunk_of(far - 1, CHUNK) + 1
        for first in range(chunk_of(low, CHUNK), end, UNROLL):
            for i in tl.static_range(UNROLL):  # unrolled, so that all are fetched before the first is added
                place = ((first + i) * rows + row).to(tl.int64) * heads + head
                known = member < tl.where(first + i < end, GROUP, 0)
                its_top = tl.load(top_in + place, known, float("-inf"))
                its_total = tl.load(total_in + place, known, 0.0)
                its_mixed = tl.load(
                    mixed_in + place[:, None] * V_DIM + v_at[None, :], known[:, None] & (v_at < V_DIM)[None, :], 0.0
                )
                higher = tl.maximum(top, its_top)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                mine, its = tl.exp2(top - base), tl.exp2(its_top - base)
                total = total * mine + its_total * its
                mixed = mixed * mine[:, None] + its_mixed * its[:, None]
                top = higher
    scores = scores_of(queries, k_block, scale, softcap, CAPPED)
    sees = (key < seen) & (key >= low)
    top, total, mixed = fold(tl.where(sees[None, :], scores, float("-inf")), v_block, top, total, mixed)
    if SINKS:
        sink = tl.load(sinks + head, valid, 0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        mixed = mixed * shrink[:, None]
    total = tl.where(valid, total, 1.0)
    tl.store(to, mixed / total[:, None], fits)


def chunks_for(keys: int, chunk: int) -> int:
    """How many chunks so many keys make."""
    first, second = int(SMALL.value), int(MIDDLE.value)
    small, middle = first * chunk, second * 2 * chunk
    if keys <= small:
        return -(-keys // chunk)
    if keys <= small + middle:
        return first - (small - keys) // (2 * chunk)
    return first + second - (small + middle - keys) // (8 * chunk)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """The kernels on [1, heads, rows, dim] queries; the twin's arguments and result."""
    _, heads, rows, k_dim = query.shape
    kv_heads, v_dim = keys.shape[1], values.shape[3]
    group = heads // kv_heads
    if query.stride(3) != 1:
        query = query.contiguous()
    out = torch.empty(1, rows, heads, v_dim, dtype=query.dtype, device=query.device)
    # So many rows that all programs have work anyway need no small chunks, and would have large sums to keep.
    chunk = CHUNK if rows < 64 else 2 * CHUNK if rows == 64 else 8 * CHUNK
    far = max((keys.shape[2] - 1) // NEAR - 1, 0) * NEAR  # of a row that sees all cells
    chunks = chunks_for(far, chunk)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    mixed = torch.empty(max(chunks, 1), rows, heads, v_dim, **floats)
    top, total = torch.empty(2, max(chunks, 1), rows, heads, **floats)
    strides = (query.stride(1), query.stride(2), *keys.stride()[:3], *values.stride()[:3])
    shape: dict[str, Any] = {
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_PAD": max(16, triton.next_power_of_2(k_dim)),
        "V_PAD": max(16, triton.next_power_of_2(v_dim)),
        "GROUP": group,
        "CAPPED": softcap > 0,
        "WIDTH": table.shape[-1],
        "CHUNK": chunk,
        "NEAR": NEAR,
        "SEEN": SEEN,
        "LOW": LOW,
    }
    # What fits into the registers: products in float32 take many, and so do keys and values of many bytes.
    single = query.dtype == torch.float32
    wide = max(shape["K_PAD"], shape["V_PAD"]) * query.element_size() > 256
    if chunks:
        tile = 16 if single or min(TILE_SIZE, rows) * group <= 16 else 64  # query heads × rows taken at once
        parts = -(-min(TILE_SIZE, rows) * group // tile)
        tiles = table.shape[2] - rows
        shared_keys[(tiles * parts, kv_heads, chunks)](
            query, keys, values, table, mixed, top, total, scale, softcap, *strides, rows, heads,
            PARTS=parts, TILE=tile, BLOCK=32 if wide else 64, TILE_FIRST=TILE_FIRST, TILE_ROWS=TILE_ROWS,
            TILE_SLOT=TILE_SLOT, TILE_SEEN=TILE_SEEN, TILE_LOW=TILE_LOW, **shape,
            num_warps=4, num_stages=2 if wide else 3,
        )  # fmt: skip
    own_keys[(rows, kv_heads)](
        query, keys, values, table, mixed, top, total, sinks if sinks is not None else query, out, scale, softcap,
        *strides, rows, heads,
        GROUP_PAD=max(16, triton.next_power_of_2(group)), UNROLL=UNROLL, SINKS=sinks is not None,
        SLOT=SLOT, DIRECT=DIRECT, PATH=PATH, **shape,
        num_warps=8 if wide else 4 if single else 2, num_stages=1,
    )  # fmt: skip
    return out
