"""Attention of a compiled step: 16 queries of one request that share a head of keys and values at a time.

Lane i holds query `first + i`, counted by row and then by head of the group. Each lane adds its keys in the order of
the text, and a key that it does not see adds zero, so drafts beside a row do not change its result.
"""

from __future__ import annotations

import numpy as np

from lookfar.core.addresses import bytes_at, floats_at, longs_at
from lookfar.core.atomics import take
from lookfar.core.jit import jit
from lookfar.kernels.cpu.blocks import block_size, multiply_tile, rms_factor
from lookfar.kernels.cpu.layout import (
    BLOCK,
    CACHED,
    COS,
    COUNT,
    FIRST,
    HEAD_DIM,
    HEAD_STEP,
    HEADS,
    INNER_BLOCKS,
    K_BIAS,
    K_NORM,
    KEYS,
    KIND,
    KV_HEADS,
    POSITIONS,
    Q_BIAS,
    Q_NORM,
    QKV_ROWS,
    REQUEST_COLUMNS,
    REQUEST_TABLE,
    REQUESTS,
    ROWS,
    SEEN_FROM,
    SEES,
    SIN,
    SLOT,
    SLOT_STEP,
    V_BIAS,
    VALUES,
    VISIBLE,
)
from lookfar.kernels.cpu.tiles import FLOAT32, tile_strided
from lookfar.kernels.cpu.vectors import LANES, softmax

MINUS_INFINITY = np.float32(-np.inf)


@jit
def rotate(source, bias, norm, epsilon, cos, sin, length, out, step):  # type: ignore[no-untyped-def]
    """Write one head of a query or key with its bias, norm and rotary position, one value every `step`."""
    values, to = floats_at(source, length), floats_at(out, length * step)
    cosines, sines = floats_at(cos, length), floats_at(sin, length)
    if bias != 0:
        added = floats_at(bias, length)
        for d in range(length):
            values[d] += added[d]
    if norm != 0:
        weight, factor = floats_at(norm, length), rms_factor(source, length, epsilon)
        for d in range(length):
            values[d] = weight[d] * (values[d] * factor)
    half = length // 2
    for d in range(half):
        one, other = values[d], values[d + half]
        to[d * step] = one * cosines[d] - other * sines[d]
        to[(d + half) * step] = other * cosines[d + half] + one * sines[d + half]


@jit
def write_kv(rank, size, step, layer, epsilon):  # type: ignore[no-untyped-def]
    """Write keys and values of a thread's share of the heads to the KV cache."""
    heads, kv_heads, dim = step[HEADS], step[KV_HEADS], step[HEAD_DIM]
    width = (heads + 2 * kv_heads) * dim
    unit = 0
    for index in range(step[REQUESTS]):
        request = longs_at(step[REQUEST_TABLE] + index * REQUEST_COLUMNS * 8, REQUEST_COLUMNS)
        for j in range(request[COUNT]):
            row = request[FIRST] + j
            for head in range(kv_heads):
                unit += 1
                if unit % size != rank:
                    continue
                at = request[SLOT] * step[SLOT_STEP] + head * step[HEAD_STEP] + (request[CACHED] + j) * dim
                key = step[QKV_ROWS] + (row * width + (heads + head) * dim) * 4
                bias = layer[K_BIAS] + head * dim * 4 if layer[K_BIAS] != 0 else 0
                cos, sin = step[COS] + row * dim * 4, step[SIN] + row * dim * 4
                rotate(key, bias, layer[K_NORM], epsilon, cos, sin, dim, layer[KEYS] + at * 4, 1)
                source = floats_at(key + kv_heads * dim * 4, dim)
                value = floats_at(layer[VALUES] + at * 4, dim)
                for d in range(dim):
                    value[d] = source[d]
                if layer[V_BIAS] != 0:
                    added = floats_at(layer[V_BIAS] + head * dim * 4, dim)
                    for d in range(dim):
                        value[d] += added[d]


@jit
def attend(step, layer, epsilon, scale, scratch, counter):  # type: ignore[no-untyped-def]
    """Take queries until none are left, and write what they find to blocks of rows."""
    group = step[HEADS] // step[KV_HEADS]
    taken, unit = take(counter, 1), 0
    for index in range(step[REQUESTS]):
        request = longs_at(step[REQUEST_TABLE] + index * REQUEST_COLUMNS * 8, REQUEST_COLUMNS)
        queries = request[COUNT] * group
        for head in range(step[KV_HEADS]):
            for first in range(0, queries, LANES):
                if unit == taken:
                    attend_lanes(
                        step, layer, request, head, first, min(LANES, queries - first), epsilon, scale, scratch
                    )
                    taken = take(counter, 1)
                unit += 1


@jit
def attend_lanes(step, layer, request, head, first, lanes, epsilon, scale, scratch):  # type: ignore[no-untyped-def]
    """Attention of up to 16 queries with the keys and values of one head."""
    dim, group, rows = step[HEAD_DIM], step[HEADS] // step[KV_HEADS], step[ROWS]
    query, sums, out = scratch, scratch + dim * LANES * 4, scratch + (dim + 1) * LANES * 4
    scores = scratch + (2 * dim + 1) * LANES * 4
    width = (step[HEADS] + 2 * step[KV_HEADS]) * dim
    seen_from = longs_at(step[SEEN_FROM] + layer[KIND] * rows * 8, rows)
    values = floats_at(query, dim * LANES)
    begin = request[CACHED]
    for lane in range(lanes):
        row, own = request[FIRST] + (first + lane) // group, head * group + (first + lane) % group
        bias = layer[Q_BIAS] + own * dim * 4 if layer[Q_BIAS] != 0 else 0
        cos, sin, source = step[COS] + row * dim * 4, step[SIN] + row * dim * 4, row * width + own * dim
        rotate(step[QKV_ROWS] + source * 4, bias, layer[Q_NORM], epsilon, cos, sin, dim, query + lane * 4, LANES)
        begin = min(begin, seen_from[row])
    for d in range(dim):
        for lane in range(lanes):
            values[d * LANES + lane] *= scale
        for lane in range(lanes, LANES):
            values[d * LANES + lane] = 0.0
    keys = request[CACHED] + request[COUNT] - begin
    at = (request[SLOT] * step[SLOT_STEP] + head * step[HEAD_STEP] + begin * dim) * 4
    score_keys(layer[KEYS] + at, query, scores, keys, dim)
    hide_keys(step, request, seen_from, scores, begin, first, lanes)
    softmax(scores, keys, sums)
    for lane in range(0, lanes, BLOCK):
        count = block_size(lane, lanes)
        for d in range(0, dim, LANES):
            to = out + (lane * dim + d) * 4
            multiply_tile(FLOAT32, count, scores + lane * 4, layer[VALUES] + at + d * 4, to, keys, LANES, dim, dim, 0)
    write_lanes(step, request[FIRST], head, first, lanes, out, sums)


@jit
def score_keys(keys, query, scores, count, dim):  # type: ignore[no-untyped-def]
    """Multiply keys with 16 queries; scores [key][16]."""
    if count < BLOCK:
        for key in range(count):
            tile_strided(1, keys + key * dim * 4, query, scores + key * LANES * 4, dim, dim, LANES, LANES, 0)
        return
    for key in range(0, count, BLOCK):
        first = min(key, count - BLOCK)  # the last keys may be multiplied twice
        tile_strided(BLOCK, keys + first * dim * 4, query, scores + first * LANES * 4, dim, dim, LANES, LANES, 0)


@jit
def hide_keys(step, request, seen_from, scores, begin, first, lanes):  # type: ignore[no-untyped-def]
    """Let the scores of keys that a lane does not see be −∞."""
    cached, count, group = request[CACHED], request[COUNT], step[HEADS] // step[KV_HEADS]
    found = floats_at(scores, (cached + count - begin) * LANES)
    visible = bytes_at(step[VISIBLE] + request[SEES], count * count)
    positions = longs_at(step[POSITIONS], step[ROWS])
    for lane in range(lanes):
        j = (first + lane) // group
        start = seen_from[request[FIRST] + j]
        for key in range(begin, min(start, cached)):
            found[(key - begin) * LANES + lane] = MINUS_INFINITY
        for other in range(count):
            if visible[j * count + other] == 0 or positions[request[FIRST] + other] < start:
                found[(cached + other - begin) * LANES + lane] = MINUS_INFINITY


@jit
def write_lanes(step, first_row, head, first, lanes, out, sums):  # type: ignore[no-untyped-def]
    """Write the results of some lanes to blocks of rows."""
    dim, group, rows = step[HEAD_DIM], step[HEADS] // step[KV_HEADS], step[ROWS]
    length = step[HEADS] * dim
    values, totals = floats_at(out, lanes * dim), floats_at(sums, LANES)
    for lane in range(lanes):
        row, own = first_row + (first + lane) // group, head * group + (first + lane) % group
        start = row // BLOCK * BLOCK
        count, factor = block_size(start, rows), np.float32(1.0) / totals[lane]
        block = floats_at(step[INNER_BLOCKS] + start * length * 4, count * length)
        for d in range(dim):
            block[(own * dim + d) * count + row - start] = values[lane * dim + d] * factor
