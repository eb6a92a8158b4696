"""A whole step of a decoder in one compiled call that all threads of a team run, each with its own part of the work.

Rows are kept in blocks, [k][rows of the block], so that a tile reads the values of all its rows for one k from one place.
A block has as many rows as the largest tile, the last one as few as fit; rows that fill it up are zero.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from lookfar.core.addresses import floats_at
from lookfar.core.jit import jit
from lookfar.kernels.cpu.barrier import wait_for_all
from lookfar.kernels.cpu.vectors import (
    LANES,
    TILE_ROWS,
    gated_silu,
    softmax,
    sum_of_squares,
    tile,
    tile_add,
    tile_strided,
)

BLOCK = TILE_ROWS[-1]
SIZES = np.array([min(size for size in TILE_ROWS if size >= rows) for rows in range(1, BLOCK + 1)])
# Columns of the sizes of a step.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, ROWS, SLOT_STEP, HEAD_STEP = range(9)
# Columns about a layer: addresses of packed weights, then of vectors (0: none) and KV buffers; then its kind.
QKV, OUT, GATE, UP, DOWN, NORM, MLP_NORM, Q_NORM, K_NORM, Q_BIAS, K_BIAS, V_BIAS, KEYS, VALUES, KIND = range(15)
COLUMNS = 15
# Columns about a request: its first row, its rows, its cached tokens, its slot, where its visible rows begin.
FIRST, COUNT, CACHED, SLOT, VISIBLE = range(5)
MINUS_INFINITY = np.float32(-np.inf)


@jit
def block_of(row, rows):  # type: ignore[no-untyped-def]
    """Return the first row of a row's block, and the rows that the block has with its padding."""
    first = row // BLOCK * BLOCK
    return first, SIZES[min(BLOCK, rows - first) - 1]


@jit
def share(count, rank, size):  # type: ignore[no-untyped-def]
    """Return the part of `count` things that a thread does."""
    return count * rank // size, count * (rank + 1) // size


@jit
def multiply_tile(rows, x, w, y, length, x_step, w_step, y_step):  # type: ignore[no-untyped-def]
    """As `tile`, compiled once for all callers."""
    tile(rows, x, w, y, length, x_step, w_step, y_step)


@jit
def multiply(x, rows, length, weights, panels, y, y_step, add):  # type: ignore[no-untyped-def]
    """Multiply blocks of rows with some panels of 16 columns of a packed weight."""
    for panel in range(panels[0], panels[1]):
        w = weights + panel * length * LANES * 4
        for first in range(0, rows, BLOCK):
            size = SIZES[min(BLOCK, rows - first) - 1]
            place = y + (first * y_step + panel * LANES) * 4
            if add:
                tile_add(size, x + first * length * 4, w, place, length, size, LANES, y_step)
            else:
                multiply_tile(size, x + first * length * 4, w, place, length, size, LANES, y_step)


@jit
def normalise(h, chosen, weight, epsilon, x, rank, size):  # type: ignore[no-untyped-def]
    """Write RMS-normalised rows to blocks; each thread writes some of the columns of all rows."""
    rows, length = len(chosen), h.shape[1]
    first_column, last_column = share(length, rank, size)
    for row in range(rows):
        first, width = block_of(row, rows)
        address = h.ctypes.data + chosen[row] * length * 4
        mean = sum_of_squares(address, length // LANES) / np.float32(length)
        factor = np.float32(1.0) / np.sqrt(mean + epsilon)
        values = h[chosen[row]]
        place = first * length + row - first
        for k in range(first_column, last_column):
            x[place + k * width] = weight[k] * (values[k] * factor)
    clear_padding(x, rows, length, rank, size)


@jit
def clear_padding(x, rows, length, rank, size):  # type: ignore[no-untyped-def]
    """Let the rows that fill up the last block be zero."""
    first, width = block_of(rows - 1, rows)
    first_column, last_column = share(length, rank, size)
    for k in range(first_column, last_column):
        for row in range(rows - first, width):
            x[first * length + k * width + row] = 0.0


@jit
def rotate(source, bias, norm, epsilon, cos, sin, out, step):  # type: ignore[no-untyped-def]
    """Write one head of a query or key with its bias, norm and rotary position, one value every `step`."""
    length = len(source)
    if bias != 0:
        added = floats_at(bias, length)
        for d in range(length):
            source[d] += added[d]
    if norm != 0:
        weight = floats_at(norm, length)
        mean = sum_of_squares(source.ctypes.data, length // LANES) / np.float32(length)
        factor = np.float32(1.0) / np.sqrt(mean + epsilon)
        for d in range(length):
            source[d] = weight[d] * (source[d] * factor)
    half = length // 2
    for d in range(half):
        one, other = source[d], source[d + half]
        out[d * step] = one * cos[d] - other * sin[d]
        out[(d + half) * step] = other * cos[d + half] + one * sin[d + half]


@jit
def write_kv(about, sizes, layer, requests, qkv, cos, sin, epsilon):  # type: ignore[no-untyped-def]
    """Write keys and values of a thread's share of the heads to the KV cache."""
    rank, size = about
    heads, kv_heads, dim = sizes[HEADS], sizes[KV_HEADS], sizes[HEAD_DIM]
    unit = 0
    for request in range(len(requests)):
        for j in range(requests[request, COUNT]):
            row = requests[request, FIRST] + j
            at = requests[request, SLOT] * sizes[SLOT_STEP] + (requests[request, CACHED] + j) * dim
            for head in range(kv_heads):
                unit += 1
                if unit % size != rank:
                    continue
                place = (at + head * sizes[HEAD_STEP]) * 4
                column = (heads + head) * dim
                key, value = floats_at(layer[KEYS] + place, dim), floats_at(layer[VALUES] + place, dim)
                bias = layer[K_BIAS] + head * dim * 4 if layer[K_BIAS] != 0 else 0
                source = qkv[row, column : column + dim]
                rotate(source, bias, layer[K_NORM], epsilon, cos[row], sin[row], key, 1)
                column += kv_heads * dim
                for d in range(dim):
                    value[d] = qkv[row, column + d]
                if layer[V_BIAS] != 0:
                    added = floats_at(layer[V_BIAS] + head * dim * 4, dim)
                    for d in range(dim):
                        value[d] += added[d]


@jit
def attend(about, sizes, layer, requests, masks, qkv, cos, sin, constants, x, scratch):  # type: ignore[no-untyped-def]
    """Attention for a thread's share: 16 queries of one request that share a head of keys and values at a time."""
    rank, size = about
    kv_heads = sizes[KV_HEADS]
    group = sizes[HEADS] // kv_heads
    unit = 0
    for request in range(len(requests)):
        queries = requests[request, COUNT] * group
        for head in range(kv_heads):
            for first in range(0, queries, LANES):
                unit += 1
                if unit % size == rank:
                    lanes = min(LANES, queries - first)
                    queries_of = (head, first, lanes, group)
                    attend_lanes(
                        sizes, layer, requests[request], queries_of, masks, qkv, cos, sin, constants, x, scratch
                    )


@jit
def attend_lanes(sizes, layer, request, queries, masks, qkv, cos, sin, constants, x, scratch):  # type: ignore[no-untyped-def]
    """Attention of up to 16 queries: lane i is query `first + i`, counted by row and then by head of the group."""
    head, first, lanes, group = queries
    epsilon, scale = constants
    visible, seen_from, positions = masks
    dim, cached, count = sizes[HEAD_DIM], request[CACHED], request[COUNT]
    query, sums, out = scratch[: dim * LANES], scratch[dim * LANES :], scratch[dim * LANES + LANES :]
    scores = scratch[(2 * dim + 1) * LANES :]
    begin = cached
    for lane in range(LANES):
        if lane >= lanes:
            for d in range(dim):
                query[d * LANES + lane] = 0.0
            continue
        row, own = request[FIRST] + (first + lane) // group, head * group + (first + lane) % group
        bias = layer[Q_BIAS] + own * dim * 4 if layer[Q_BIAS] != 0 else 0
        source = qkv[row, own * dim : (own + 1) * dim]
        rotate(source, bias, layer[Q_NORM], epsilon, cos[row], sin[row], query[lane:], LANES)
        begin = min(begin, seen_from[layer[KIND], row])
    for i in range(dim * LANES):
        query[i] *= scale
    keys = cached + count - begin
    place = (request[SLOT] * sizes[SLOT_STEP] + head * sizes[HEAD_STEP] + begin * dim) * 4
    score_keys(layer[KEYS] + place, query.ctypes.data, scores.ctypes.data, keys, dim)
    for lane in range(lanes):
        j = (first + lane) // group
        row = request[FIRST] + j
        start = seen_from[layer[KIND], row]
        for key in range(begin, min(start, cached)):
            scores[(key - begin) * LANES + lane] = MINUS_INFINITY
        at = request[VISIBLE] + j * count
        for other in range(count):
            if not visible[at + other] or positions[request[FIRST] + other] < start:
                scores[(cached + other - begin) * LANES + lane] = MINUS_INFINITY
    softmax(scores.ctypes.data, keys, sums.ctypes.data)
    for lane in range(0, lanes, BLOCK):
        taken = SIZES[min(BLOCK, lanes - lane) - 1]
        for d in range(0, dim, LANES):
            multiply_tile(
                taken,
                scores.ctypes.data + lane * 4,
                layer[VALUES] + place + d * 4,
                out.ctypes.data + (lane * dim + d) * 4,
                keys,
                LANES,
                dim,
                dim,
            )
    length = sizes[HEADS] * dim
    for lane in range(lanes):
        row, own = request[FIRST] + (first + lane) // group, head * group + (first + lane) % group
        start, width = block_of(row, sizes[ROWS])
        factor, to = np.float32(1.0) / sums[lane], start * length + row - start
        for d in range(dim):
            x[to + (own * dim + d) * width] = out[lane * dim + d] * factor


@jit
def score_keys(keys, query, scores, count, dim):  # type: ignore[no-untyped-def]
    """Multiply keys with 16 queries; scores [key][16]."""
    if count < BLOCK:
        for key in range(count):
            tile_strided(1, keys + key * dim * 4, query, scores + key * LANES * 4, dim, dim, LANES, LANES)
        return
    for key in range(0, count, BLOCK):
        first = min(key, count - BLOCK)  # the last keys may be multiplied twice
        tile_strided(BLOCK, keys + first * dim * 4, query, scores + first * LANES * 4, dim, dim, LANES, LANES)


@jit
def feed_forward(about, sizes, layer, x, inner, scratch):  # type: ignore[no-untyped-def]
    """Multiply blocks of rows with a thread's share of the gate and up columns; writes blocks of their products."""
    rank, size = about
    length, rows, width = sizes[HIDDEN], sizes[ROWS], sizes[INNER]
    first_panel, last_panel = share(width // LANES, rank, size)
    gate, up = scratch[: BLOCK * LANES], scratch[BLOCK * LANES :]
    for panel in range(first_panel, last_panel):
        place = panel * length * LANES * 4
        for first in range(0, rows, BLOCK):
            count = SIZES[min(BLOCK, rows - first) - 1]
            source = x + first * length * 4
            multiply_tile(count, source, layer[GATE] + place, gate.ctypes.data, length, count, LANES, LANES)
            multiply_tile(count, source, layer[UP] + place, up.ctypes.data, length, count, LANES, LANES)
            gated_silu(gate.ctypes.data, up.ctypes.data, count)
            to = first * width + panel * LANES * count
            for column in range(LANES):
                for row in range(count):
                    inner[to + column * count + row] = gate[row * LANES + column]


@jit
def is_above(value, other):  # type: ignore[no-untyped-def]
    return value > other or (value != value and other == other)  # a NaN is above all numbers, as in torch


@jit
def most_likely(logits, count, ids, values):  # type: ignore[no-untyped-def]
    """Write the most likely tokens of a row, in order; of equal ones the first."""
    kept = 0
    for token in range(count):
        value, place = logits[token], kept
        if kept < len(ids):
            kept += 1
        elif is_above(value, values[kept - 1]):
            place = kept - 1
        else:
            continue
        while place > 0 and is_above(value, values[place - 1]):
            ids[place], values[place] = ids[place - 1], values[place - 1]
            place -= 1
        ids[place], values[place] = token, value


def _run_step(about, counter, sizes, constants, layers, requests, masks, rope, buffers, head, found):  # type: ignore[no-untyped-def]
    """Run a step: `h` becomes the hidden states after the last layer, and `found` the logits and the likeliest tokens."""
    rank, size = about
    h, x, qkv, inner, all_scratch = buffers
    cos, sin = rope
    scratch = all_scratch[rank]
    rows, hidden, dim = sizes[ROWS], sizes[HIDDEN], sizes[HEAD_DIM]
    width, attended = (sizes[HEADS] + 2 * sizes[KV_HEADS]) * dim, sizes[HEADS] * dim
    every_row = np.arange(rows)
    columns, reached = share(hidden // LANES, rank, size), 0
    for index in range(len(layers)):
        layer = layers[index]
        normalise(h, every_row, floats_at(layer[NORM], hidden), constants[0], x, rank, size)
        reached += size
        wait_for_all(counter, reached)
        panels = share(width // LANES, rank, size)
        multiply(x.ctypes.data, rows, hidden, layer[QKV], panels, qkv.ctypes.data, width, False)
        reached += size
        wait_for_all(counter, reached)
        write_kv(about, sizes, layer, requests, qkv, cos, sin, constants[0])
        clear_padding(inner, rows, attended, rank, size)
        reached += size
        wait_for_all(counter, reached)
        attend(about, sizes, layer, requests, masks, qkv, cos, sin, constants, inner, scratch)
        reached += size
        wait_for_all(counter, reached)
        multiply(inner.ctypes.data, rows, attended, layer[OUT], columns, h.ctypes.data, hidden, True)
        reached += size
        wait_for_all(counter, reached)
        normalise(h, every_row, floats_at(layer[MLP_NORM], hidden), constants[0], x, rank, size)
        reached += size
        wait_for_all(counter, reached)
        feed_forward(about, sizes, layer, x.ctypes.data, inner, scratch)
        reached += size
        wait_for_all(counter, reached)
        multiply(inner.ctypes.data, rows, sizes[INNER], layer[DOWN], columns, h.ctypes.data, hidden, True)
        reached += size
        wait_for_all(counter, reached)
    logit_rows, final_norm, head_weight = head
    logits, choices, top_ids, top_logits = found
    if len(logit_rows) > 0:
        normalise(h, logit_rows, final_norm, constants[0], x, rank, size)
        reached += size
        wait_for_all(counter, reached)
        panels = share(logits.shape[1] // LANES, rank, size)
        y = logits.ctypes.data
        multiply(x.ctypes.data, len(logit_rows), hidden, head_weight, panels, y, logits.shape[1], False)
        reached += size
        wait_for_all(counter, reached)
        for row in range(rank, len(logit_rows), size):
            most_likely(logits[row], sizes[VOCAB], top_ids[row], top_logits[row])
            choices[row] = top_ids[row, 0]
    reached += size
    wait_for_all(counter, reached)


run_step = partial(jit, nogil=True)(_run_step)
