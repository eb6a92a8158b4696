"""A whole step of a decoder in one compiled call that all threads of a team run, each with a part of the work."""

from __future__ import annotations

from lookfar.core.addresses import floats_at, ints_at, longs_at
from lookfar.core.jit import jit
from lookfar.kernels.cpu.attention import attend, write_kv
from lookfar.kernels.cpu.barrier import wait_for_all
from lookfar.kernels.cpu.blocks import (
    block_size,
    clear_padding,
    multiply,
    multiply_tile,
    rms_factor,
    share,
    take_panels,
    write_block,
)
from lookfar.kernels.cpu.formats import panel_size
from lookfar.kernels.cpu.layout import (
    BLOCK,
    BLOCKS,
    CHOSEN,
    COUNTERS,
    DOWN,
    FINAL_NORM,
    FORMATS,
    GATE,
    HEAD,
    HEAD_DIM,
    HEAD_FORMAT,
    HEADS,
    HIDDEN,
    INNER,
    INNER_BLOCKS,
    KV_HEADS,
    LAYER_COLUMNS,
    LAYERS,
    LOGIT_ROWS,
    LOGITS,
    MLP_NORM,
    NORM,
    NUM_LAYERS,
    OUT,
    PHASES,
    QKV,
    QKV_ROWS,
    ROWS,
    SCRATCH,
    SCRATCH_STEP,
    STATES,
    STEP_COLUMNS,
    TOP_IDS,
    TOP_K,
    TOP_LOGITS,
    UP,
    VOCAB,
)
from lookfar.kernels.cpu.vectors import LANES, gated_silu


@jit
def normalise(rank, size, step, weight, epsilon):  # type: ignore[no-untyped-def]
    """Write RMS-normalised rows to blocks; each thread writes some columns of all rows."""
    rows, length = step[ROWS], step[HIDDEN]
    columns = share(length, rank, size)
    for row in range(rows):
        values = step[STATES] + row * length * 4
        write_block(row, rows, length, values, weight, rms_factor(values, length, epsilon), step[BLOCKS], columns)
    clear_padding(step[BLOCKS], rows, length, columns)


@jit
def normalise_chosen(rank, size, step, epsilon):  # type: ignore[no-untyped-def]
    """The same for the rows whose logits are wanted."""
    rows, length = step[LOGIT_ROWS], step[HIDDEN]
    chosen, columns = longs_at(step[CHOSEN], rows), share(length, rank, size)
    for row in range(rows):
        values = step[STATES] + chosen[row] * length * 4
        factor = rms_factor(values, length, epsilon)
        write_block(row, rows, length, values, step[FINAL_NORM], factor, step[BLOCKS], columns)
    clear_padding(step[BLOCKS], rows, length, columns)


@jit
def weights_of(layer, column):  # type: ignore[no-untyped-def]
    """Return the address and the format of the weights of a product."""
    return layer[column], layer[FORMATS + column]


@jit
def feed_forward(step, layer, scratch, counter, size):  # type: ignore[no-untyped-def]
    """Multiply blocks of rows with the gate and up columns; writes blocks of SiLU(gate) · up."""
    length, rows, width = step[HIDDEN], step[ROWS], step[INNER]
    gate, up = scratch, scratch + BLOCK * LANES * 4
    gate_size, up_size = panel_size(layer[FORMATS + GATE], length), panel_size(layer[FORMATS + UP], length)
    first_panel, last_panel = take_panels(width // LANES, counter, size)
    while first_panel < last_panel:
        for panel in range(first_panel, last_panel):
            gates, ups = layer[GATE] + panel * gate_size, layer[UP] + panel * up_size
            for first in range(0, rows, BLOCK):
                count, source = block_size(first, rows), step[BLOCKS] + first * length * 4
                multiply_tile(layer[FORMATS + GATE], count, source, gates, gate, length, count, LANES, LANES, 0)
                multiply_tile(layer[FORMATS + UP], count, source, ups, up, length, count, LANES, LANES, 0)
                gated_silu(gate, up, count)
                values = floats_at(gate, count * LANES)
                to = floats_at(step[INNER_BLOCKS] + (first * width + panel * LANES * count) * 4, LANES * count)
                for column in range(LANES):
                    for row in range(count):
                        to[column * count + row] = values[row * LANES + column]
        first_panel, last_panel = take_panels(width // LANES, counter, size)


@jit
def run_layer(rank, size, step, layer, epsilon, scale, scratch, phase):  # type: ignore[no-untyped-def]
    """Run one layer, in phases that each end when all threads are done."""
    counters = step[COUNTERS]
    counter = counters + 8 * (phase + 1)  # of the work that is taken
    rows, hidden = step[ROWS], step[HIDDEN]
    attended = step[HEADS] * step[HEAD_DIM]
    width = attended + 2 * step[KV_HEADS] * step[HEAD_DIM]

    normalise(rank, size, step, layer[NORM], epsilon)
    wait_for_all(counters, size * (phase + 1))
    multiply(step[BLOCKS], rows, hidden, weights_of(layer, QKV), step[QKV_ROWS], width, 0, counter + 8, size)
    wait_for_all(counters, size * (phase + 2))
    write_kv(rank, size, step, layer, epsilon)
    clear_padding(step[INNER_BLOCKS], rows, attended, share(attended, rank, size))
    wait_for_all(counters, size * (phase + 3))
    attend(step, layer, epsilon, scale, scratch, counter + 24)
    wait_for_all(counters, size * (phase + 4))
    multiply(step[INNER_BLOCKS], rows, attended, weights_of(layer, OUT), step[STATES], hidden, 1, counter + 32, size)
    wait_for_all(counters, size * (phase + 5))
    normalise(rank, size, step, layer[MLP_NORM], epsilon)
    wait_for_all(counters, size * (phase + 6))
    feed_forward(step, layer, scratch, counter + 48, size)
    wait_for_all(counters, size * (phase + 7))
    multiply(
        step[INNER_BLOCKS], rows, step[INNER], weights_of(layer, DOWN), step[STATES], hidden, 1, counter + 56, size
    )
    wait_for_all(counters, size * (phase + 8))


@jit
def is_above(value, other):  # type: ignore[no-untyped-def]
    return value > other or (value != value and other == other)  # a NaN is above all numbers, as in torch


@jit
def most_likely(logits, count, ids, values, kept):  # type: ignore[no-untyped-def]
    """Write the most likely tokens of a row, in order; of equal ones the first."""
    found = 0
    for token in range(count):
        value, place = logits[token], found
        if found < kept:
            found += 1
        elif is_above(value, values[found - 1]):
            place = found - 1
        else:
            continue
        while place > 0 and is_above(value, values[place - 1]):
            ids[place], values[place] = ids[place - 1], values[place - 1]
            place -= 1
        ids[place], values[place] = token, value


@jit
def write_logits(rank, size, step, epsilon, phase):  # type: ignore[no-untyped-def]
    """Write the logits of the chosen rows, and their most likely tokens."""
    counters, rows, k = step[COUNTERS], step[LOGIT_ROWS], step[TOP_K]
    width = (step[VOCAB] + LANES - 1) // LANES * LANES
    normalise_chosen(rank, size, step, epsilon)
    wait_for_all(counters, size * (phase + 1))
    counter = counters + 8 * (phase + 2)
    head = step[HEAD], step[HEAD_FORMAT]
    multiply(step[BLOCKS], rows, step[HIDDEN], head, step[LOGITS], width, 0, counter, size)
    wait_for_all(counters, size * (phase + 2))
    for row in range(rank, rows, size):
        logits = floats_at(step[LOGITS] + row * width * 4, width)
        ids, values = ints_at(step[TOP_IDS] + row * k * 4, k), floats_at(step[TOP_LOGITS] + row * k * 4, k)
        most_likely(logits, step[VOCAB], ids, values, k)
    wait_for_all(counters, size * (phase + 3))


def _run_step(rank, size, address, epsilon, scale):  # type: ignore[no-untyped-def]
    """Run the step whose table is at an address, as one of `size` threads."""
    step = longs_at(address, STEP_COLUMNS)
    scratch = step[SCRATCH] + rank * step[SCRATCH_STEP] * 4
    for index in range(step[NUM_LAYERS]):
        layer = longs_at(step[LAYERS] + index * LAYER_COLUMNS * 8, LAYER_COLUMNS)
        run_layer(rank, size, step, layer, epsilon, scale, scratch, index * PHASES)
    if step[LOGIT_ROWS] > 0:
        write_logits(rank, size, step, epsilon, step[NUM_LAYERS] * PHASES)


run_step = jit(_run_step, nogil=True)
