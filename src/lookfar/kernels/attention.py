"""Tree attention in Triton: many rows, each with a tree path of its own, against the KV cache.

Two kernels. The first attends from tiles of rows to the keys far behind all of them, which rows of one request share;
the keys are split over programs. The second attends, for each row alone, to the last 33 to 64 keys of its own path,
gathered in their order, and combines both results.

The boundary between the two, the blocks and chunks of keys, and the order in which they are added depend on the
position of a row and on nothing else. The bits of a row are therefore independent of the other rows of a step and of
their number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lookfar.kernels.overlap import launch_options, wait
from lookfar.kernels.row_table import (
    KV_LEN,
    MAX_PATH,
    PREFIX_LEN,
    SLOT,
    TILE_FIRST,
    TILE_KV_LEN,
    TILE_ROWS,
    TILE_SIZE,
    TILE_SLOT,
    TILE_WINDOW_START,
    TREE_PATH,
    WINDOW_START,
)

CHUNK = 128  # keys of one program at the beginning of a text
# The first chunks are small, so that short texts keep many programs busy; the next ones are twice as large and all
# others eight times, because combining very many chunks would cost more than the keys.
SMALL, MIDDLE = tl.constexpr(8), tl.constexpr(12)
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
def block_scores(q, k, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scores of a block of keys as exponents of two, which are cheaper to compute."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634) / softcap) + 1.0))
    return scores * 1.4426950408889634


@triton.jit
def add_block(scores, v, row_max, row_sum, row_values):  # type: ignore[no-untyped-def]
    """Add a block of keys to a running softmax; a block without a visible key changes nothing."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - base)
    weights = tl.exp2(scores - base[:, None])
    row_sum = row_sum * decay + tl.sum(weights, 1)
    row_values = row_values * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_max, row_sum, row_values


@triton.jit
def attend_far(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    table,
    values_out,
    max_out,
    sum_out,
    scale,
    softcap,
    q_head,
    q_row,
    k_slot,
    k_head,
    k_position,
    v_slot,
    v_head,
    v_position,
    rows,
    heads,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    OVERLAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_PATH: tl.constexpr,
    KV_LEN: tl.constexpr,
    WINDOW_START: tl.constexpr,
    TILE_FIRST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_SLOT: tl.constexpr,
    TILE_KV_LEN: tl.constexpr,
    TILE_WINDOW_START: tl.constexpr,
):
    """Attend from a tile of rows of one request to one chunk of the keys far behind all of them."""
    wait(OVERLAPS)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    about = table + (rows + tile) * WIDTH
    first = tl.load(about + TILE_FIRST)
    count = tl.load(about + TILE_ROWS)
    slot = tl.load(about + TILE_SLOT).to(tl.int64)
    last = tl.maximum((tl.load(about + TILE_KV_LEN) - 1) // MAX_PATH - 1, 0) * MAX_PATH
    tile_window_start = tl.load(about + TILE_WINDOW_START)
    begin = chunk_start(chunk, CHUNK)
    if (begin >= last) | (part * TILE >= count * GROUP):
        return
    end = tl.minimum(chunk_start(chunk + 1, CHUNK), last)
    begin = tl.maximum(begin, tile_window_start // BLOCK * BLOCK)
    lane = part * TILE + tl.arange(0, TILE)
    valid = lane < count * GROUP
    row = first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    kv_len = tl.load(table + row * WIDTH + KV_LEN, valid, 0)
    window_start = tl.load(table + row * WIDTH + WINDOW_START, valid, 0)
    far = tl.maximum((kv_len - 1) // MAX_PATH - 1, 0) * MAX_PATH
    k_at = tl.arange(0, K_PAD)
    v_at = tl.arange(0, V_PAD)
    queries = tl.load(
        q + head[:, None] * q_head + row[:, None] * q_row + k_at[None, :], valid[:, None] & (k_at < K_DIM)[None, :], 0.0
    )
    keys = k + slot * k_slot + kv_head * k_head
    values = v + slot * v_slot + kv_head * v_head
    row_max = tl.full([TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    row_values = tl.zeros([TILE, V_PAD], tl.float32)
    for block in range(begin, end, BLOCK):
        key = block + tl.arange(0, BLOCK)
        there = (key < end)[:, None]
        k_block = tl.load(keys + key[:, None] * k_position + k_at[None, :], there & (k_at < K_DIM)[None, :], 0.0)
        v_block = tl.load(values + key[:, None] * v_position + v_at[None, :], there & (v_at < V_DIM)[None, :], 0.0)
        scores = block_scores(queries, k_block, scale, softcap, CAPPED)
        visible = (key[None, :] < far[:, None]) & (key[None, :] >= window_start[:, None]) & (key < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, row_values = add_block(scores, v_block, row_max, row_sum, row_values)
    place = (chunk * rows + row).to(tl.int64) * heads + head
    tl.store(max_out + place, row_max, valid)
    tl.store(sum_out + place, row_sum, valid)
    tl.store(values_out + place[:, None] * V_DIM + v_at[None, :], row_values, valid[:, None] & (v_at < V_DIM)[None, :])


@triton.jit
def attend_near(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    table,
    values_in,
    max_in,
    sum_in,
    sinks,
    out,
    scale,
    softcap,
    q_head,
    q_row,
    k_slot,
    k_head,
    k_position,
    v_slot,
    v_head,
    v_position,
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
    OVERLAPS: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_PATH: tl.constexpr,
    SLOT: tl.constexpr,
    PREFIX_LEN: tl.constexpr,
    KV_LEN: tl.constexpr,
    WINDOW_START: tl.constexpr,
    TREE_PATH: tl.constexpr,
):
    """Combine the chunks of far keys of one row, then attend to the keys at the end of its path."""
    wait(OVERLAPS)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    entry = table + row * WIDTH
    kv_len = tl.load(entry + KV_LEN)
    member = tl.arange(0, GROUP_PAD)
    valid = member < GROUP
    head = kv_head * GROUP + member
    k_at = tl.arange(0, K_PAD)
    v_at = tl.arange(0, V_PAD)
    to = out + (row * heads + head)[:, None] * V_DIM + v_at[None, :]
    fits = valid[:, None] & (v_at < V_DIM)[None, :]
    if kv_len == 0:  # padding
        tl.store(to, tl.zeros([GROUP_PAD, V_PAD], tl.float32), fits)
        return
    window_start = tl.load(entry + WINDOW_START)
    prefix_len = tl.load(entry + PREFIX_LEN)
    slot = tl.load(entry + SLOT).to(tl.int64)
    far = tl.maximum((kv_len - 1) // MAX_PATH - 1, 0) * MAX_PATH

    key = far + tl.arange(0, 2 * MAX_PATH)
    position = tl.load(entry + TREE_PATH + key - prefix_len, (key >= prefix_len) & (key < kv_len), 0)
    position = tl.where(key < prefix_len, key, position)
    there = (key < kv_len)[:, None]
    keys = k + slot * k_slot + kv_head * k_head
    values = v + slot * v_slot + kv_head * v_head
    queries = tl.load(
        q + head[:, None] * q_head + row * q_row + k_at[None, :], valid[:, None] & (k_at < K_DIM)[None, :], 0.0
    )
    k_block = tl.load(keys + position[:, None] * k_position + k_at[None, :], there & (k_at < K_DIM)[None, :], 0.0)
    v_block = tl.load(values + position[:, None] * v_position + v_at[None, :], there & (v_at < V_DIM)[None, :], 0.0)

    row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    row_values = tl.zeros([GROUP_PAD, V_PAD], tl.float32)
    if far > window_start:
        end = chunk_of(far - 1, CHUNK) + 1
        for first in range(chunk_of(window_start, CHUNK), end, UNROLL):
            for i in tl.static_range(UNROLL):  # unrolled, so that all are fetched before the first is added
                place = ((first + i) * rows + row).to(tl.int64) * heads + head
                known = member < tl.where(first + i < end, GROUP, 0)
                chunk_max = tl.load(max_in + place, known, float("-inf"))
                chunk_sum = tl.load(sum_in + place, known, 0.0)
                chunk_values = tl.load(
                    values_in + place[:, None] * V_DIM + v_at[None, :], known[:, None] & (v_at < V_DIM)[None, :], 0.0
                )
                new_max = tl.maximum(row_max, chunk_max)
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
                own_decay, chunk_decay = tl.exp2(row_max - base), tl.exp2(chunk_max - base)
                row_sum = row_sum * own_decay + chunk_sum * chunk_decay
                row_values = row_values * own_decay[:, None] + chunk_values * chunk_decay[:, None]
                row_max = new_max
    scores = block_scores(queries, k_block, scale, softcap, CAPPED)
    visible = (key < kv_len) & (key >= window_start)
    scores = tl.where(visible[None, :], scores, float("-inf"))
    row_max, row_sum, row_values = add_block(scores, v_block, row_max, row_sum, row_values)
    if SINKS:
        sink = tl.load(sinks + head, valid, 0.0).to(tl.float32) * 1.4426950408889634
        new_max = tl.maximum(row_max, sink)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.exp2(sink - new_max)
        row_values = row_values * decay[:, None]
    row_sum = tl.where(valid, row_sum, 1.0)
    tl.store(to, row_values / row_sum[:, None], fits)


def chunks_for(keys: int) -> int:
    """Return the number of chunks of so many keys."""
    first, second = int(SMALL.value), int(MIDDLE.value)
    small, middle = first * CHUNK, second * 2 * CHUNK
    if keys <= small:
        return -(-keys // CHUNK)
    if keys <= small + middle:
        return first - (small - keys) // (2 * CHUNK)
    return first + second - (small + middle - keys) // (8 * CHUNK)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Run the kernels on queries [1, heads, rows, dim]; arguments and result as for `reference.attend`."""
    _, heads, rows, k_dim = query.shape
    kv_heads, v_dim = keys.shape[1], values.shape[3]
    group = heads // kv_heads
    if query.stride(3) != 1:
        query = query.contiguous()
    out = torch.empty(1, rows, heads, v_dim, dtype=query.dtype, device=query.device)
    far = max((keys.shape[2] - 1) // MAX_PATH - 1, 0) * MAX_PATH  # of a row that sees all positions
    chunks = chunks_for(far)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    row_values = torch.empty(max(chunks, 1), rows, heads, v_dim, **floats)
    row_max, row_sum = torch.empty(2, max(chunks, 1), rows, heads, **floats)
    strides = (query.stride(1), query.stride(2), *keys.stride()[:3], *values.stride()[:3])
    shape: dict[str, Any] = {
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_PAD": max(16, triton.next_power_of_2(k_dim)),
        "V_PAD": max(16, triton.next_power_of_2(v_dim)),
        "GROUP": group,
        "CAPPED": softcap > 0,
        "WIDTH": table.shape[-1],
        "CHUNK": CHUNK,
        "MAX_PATH": MAX_PATH,
        "KV_LEN": KV_LEN,
        "WINDOW_START": WINDOW_START,
        **launch_options(query.device),
    }
    # Products in float32 take many registers, and so do wide heads.
    single = query.dtype == torch.float32
    wide = max(shape["K_PAD"], shape["V_PAD"]) * query.element_size() > 256
    if chunks:
        tile = 16 if single else 64  # query heads × rows of one program; another tile would give other bits
        parts = -(-min(TILE_SIZE, rows) * group // tile)
        tiles = table.shape[2] - rows
        attend_far[(tiles * parts, kv_heads, chunks)](
            query, keys, values, table, row_values, row_max, row_sum, scale, softcap, *strides, rows, heads,
            PARTS=parts, TILE=tile, BLOCK=32 if wide else 64, TILE_FIRST=TILE_FIRST, TILE_ROWS=TILE_ROWS,
            TILE_SLOT=TILE_SLOT, TILE_KV_LEN=TILE_KV_LEN, TILE_WINDOW_START=TILE_WINDOW_START, **shape,
            num_warps=4, num_stages=2 if wide else 3,
        )  # fmt: skip
    attend_near[(rows, kv_heads)](
        query, keys, values, table, row_values, row_max, row_sum, sinks if sinks is not None else query, out,
        scale, softcap, *strides, rows, heads,
        GROUP_PAD=max(16, triton.next_power_of_2(group)), UNROLL=UNROLL, SINKS=sinks is not None,
        SLOT=SLOT, PREFIX_LEN=PREFIX_LEN, TREE_PATH=TREE_PATH, **shape,
        num_warps=8 if wide else 4 if single else 2, num_stages=1,
    )  # fmt: skip
    return out
