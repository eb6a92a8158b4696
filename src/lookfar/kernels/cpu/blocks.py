"""Rows in blocks, [k][rows of the block], and products with packed weights.

A tile reads the values of all its rows for one k from one place. The last block has as few rows as fit; rows that fill
it up are zero.
"""

from __future__ import annotations

import numpy as np

from lookfar.core.addresses import floats_at
from lookfar.core.atomics import take
from lookfar.core.jit import jit
from lookfar.kernels.cpu.formats import panel_size
from lookfar.kernels.cpu.layout import BLOCK, SIZES
from lookfar.kernels.cpu.tiles import BFLOAT16, FLOAT16, UINT8, tile, tile_bfloat16, tile_float16, tile_uint8
from lookfar.kernels.cpu.vectors import LANES, sum_of_squares

PARTS = 6  # of a product for each thread: a thread that is slower takes fewer


@jit
def block_size(first, rows):  # type: ignore[no-untyped-def]
    """Return the rows of a block with its padding."""
    return SIZES[min(BLOCK, rows - first) - 1]


@jit
def share(count, rank, size):  # type: ignore[no-untyped-def]
    """Return the part of `count` things that a thread does."""
    return count * rank // size, count * (rank + 1) // size


@jit
def multiply_tile(kind, rows, x, w, y, length, x_step, w_step, y_step, add):  # type: ignore[no-untyped-def]
    """Multiply a tile whose weights are in some format; compiled once for all callers."""
    if kind == UINT8:
        tile_uint8(rows, x, w, y, length, x_step, w_step, y_step, add)
    elif kind == BFLOAT16:
        tile_bfloat16(rows, x, w, y, length, x_step, w_step, y_step, add)
    elif kind == FLOAT16:
        tile_float16(rows, x, w, y, length, x_step, w_step, y_step, add)
    else:
        tile(rows, x, w, y, length, x_step, w_step, y_step, add)


@jit
def take_panels(panels, counter, size):  # type: ignore[no-untyped-def]
    """Take the next few panels: return the first and the one behind the last, which is not larger if none are left."""
    at_once = max(panels // (size * PARTS), 1)
    first = take(counter, at_once)
    return first, min(first + at_once, panels)


@jit
def multiply(blocks, rows, length, weights, y, y_step, add, counter, size):  # type: ignore[no-untyped-def]
    """Multiply blocks of rows with a packed weight of `y_step` columns; threads take panels until none are left.

    `weights` are an address and a format.
    """
    address, kind = weights
    panel_bytes = panel_size(kind, length)
    first_panel, last_panel = take_panels(y_step // LANES, counter, size)
    while first_panel < last_panel:
        for panel in range(first_panel, last_panel):
            w = address + panel * panel_bytes
            for first in range(0, rows, BLOCK):
                count, place = block_size(first, rows), y + (first * y_step + panel * LANES) * 4
                multiply_tile(kind, count, blocks + first * length * 4, w, place, length, count, LANES, y_step, add)
        first_panel, last_panel = take_panels(y_step // LANES, counter, size)


@jit
def rms_factor(values, length, epsilon):  # type: ignore[no-untyped-def]
    mean = sum_of_squares(values, length // LANES) / np.float32(length)
    return np.float32(1.0) / np.sqrt(mean + epsilon)


@jit
def write_block(row, rows, length, values, weight, factor, blocks, columns):  # type: ignore[no-untyped-def]
    """Write some columns of a normalised row to its block."""
    first = row // BLOCK * BLOCK
    count = block_size(first, rows)
    source, scale = floats_at(values, length), floats_at(weight, length)
    block = floats_at(blocks + first * length * 4, count * length)
    for k in range(columns[0], columns[1]):
        block[k * count + row - first] = scale[k] * (source[k] * factor)


@jit
def clear_padding(blocks, rows, length, columns):  # type: ignore[no-untyped-def]
    """Let the rows that fill up the last block be zero."""
    first = (rows - 1) // BLOCK * BLOCK
    count = block_size(first, rows)
    block = floats_at(blocks + first * length * 4, count * length)
    for k in range(columns[0], columns[1]):
        for row in range(rows - first, count):
            block[k * count + row] = 0.0
