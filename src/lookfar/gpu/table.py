"""Who sees whom in a step of packed rows, in a few integers for each row: what attention takes instead of a mask.

The rows of all sequences lie side by side. A row sees the keys at positions `LOW … SEEN − 1` of its own text. Those
before `DIRECT` lie in the cell of their position; from there on, along a branch of a tree, the row's `PATH` says which
cell holds them. Behind the rows come the tiles: neighbouring rows of one sequence that attend together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.arrays import Int32s, Ints
from lookfar.jit import jit
from lookfar.tree import Riders, SequencePlan

NEAR = 32  # the most keys of a path; also where attention parts near keys from far ones
TILE_SIZE = 16  # the most rows of a tile
SLOT, DIRECT, SEEN, LOW, PATH = 0, 1, 2, 3, 4  # columns of a row
TILE_FIRST, TILE_ROWS = 0, 1  # columns of a tile
WIDTH = PATH + NEAR
TOKENS, POSITIONS, SLOTS, CELLS = 0, 1, 2, 3  # rows of the inputs, which have a column for each packed row


def tiles_for(rows: int, batch: int) -> int:
    """The most tiles that so many rows of so many sequences can come to."""
    return min(rows, -(-rows // TILE_SIZE) + batch - 1)


def is_told_by_paths(rows: SequencePlan) -> bool:
    """Does every row see the text and one path behind it, short enough for a table?"""
    return int(rows.tree.depths.max(initial=0)) <= NEAR and all(map(_ride_along_paths, rows.riders))


def _ride_along_paths(riders: Riders) -> bool:
    """Does each rider see one key at every position up to its own?"""
    before = np.cumsum(riders.sees, 1)
    in_order = (riders.offsets[None, :] == before) | ~riders.sees
    return bool(in_order.all() and (riders.offsets == before[:, -1:].T).all() and (riders.offsets <= NEAR).all())


def fill(
    plans: Seq[SequencePlan], first_slot: int, inputs: Ints, tables: Int32s, windows: Int32s, scratch: int
) -> None:
    """Write a step into its buffers; padding goes to the cell `scratch` and sees nothing.

    `tables` holds one table for each kind of layer, whose window and chunk (0: none) are in `windows`.
    """
    row = tile = 0
    for i, rows in enumerate(plans):
        end = row + len(rows)
        inputs[TOKENS, row:end] = rows.tokens
        inputs[POSITIONS, row:end] = rows.positions
        chain = len(rows.chain)
        tile = describe(
            tables, windows, inputs, first_slot + i, rows.cached, chain, rows.tree.parents, row, len(rows), tile
        )
        if rows.riders:
            start = chain + len(rows.tree)
            for riders in rows.riders:
                ride(tables, windows, riders.sees, rows.cached, chain, row, start)
                start += len(riders)
        row = end
    finish(inputs, tables, row, tile, scratch)


@jit
def see(tables, windows, row, slot, direct, seen):  # type: ignore[no-untyped-def]
    for kind in range(len(tables)):
        about = tables[kind, row]
        about[SLOT], about[DIRECT], about[SEEN] = slot, direct, seen
        window, chunk = windows[kind]
        low = max(seen - window, 0) if window else 0
        about[LOW] = max(low, (seen - 1) // chunk * chunk) if chunk else low


@jit
def describe(  # type: ignore[no-untyped-def]
    tables, windows, inputs, slot, cached, chain, parents, first, count, tile
):
    """The chain and the tree of one sequence, whose rows begin at `first`; riders see nothing yet."""
    for r in range(count):
        inputs[SLOTS, first + r] = slot
        inputs[CELLS, first + r] = cached + r
    for r in range(chain):
        see(tables, windows, first + r, slot, cached + r + 1, cached + r + 1)
    direct = cached + chain
    for node in range(len(parents)):
        row, depth = first + chain + node, 1
        if parents[node] >= 0:
            above = first + chain + parents[node]
            depth = tables[0, above, SEEN] - direct + 1
        for kind in range(len(tables)):
            for d in range(depth - 1):
                tables[kind, row, PATH + d] = tables[kind, above, PATH + d]
            tables[kind, row, PATH + depth - 1] = direct + node
        see(tables, windows, row, slot, direct, direct + depth)
    for r in range(chain + len(parents), count):
        see(tables, windows, first + r, slot, direct, 0)
    rows = inputs.shape[1]
    for start in range(0, count, TILE_SIZE):
        for kind in range(len(tables)):
            tables[kind, rows + tile, TILE_FIRST] = first + start
            tables[kind, rows + tile, TILE_ROWS] = min(TILE_SIZE, count - start)
        tile += 1
    return tile


@jit
def ride(tables, windows, sees, cached, chain, first, start):  # type: ignore[no-untyped-def]
    """Riders, which begin `start` rows behind the sequence's first, see their paths."""
    direct = cached + chain
    for rider in range(len(sees)):
        row, depth = first + start + rider, 0
        for other in range(len(sees)):
            if sees[rider, other]:
                for kind in range(len(tables)):
                    tables[kind, row, PATH + depth] = cached + start + other
                depth += 1
        see(tables, windows, row, tables[0, first, SLOT], direct, direct + depth)


@jit
def finish(inputs, tables, used, tiles, scratch):  # type: ignore[no-untyped-def]
    rows = inputs.shape[1]
    for row in range(used, rows):
        inputs[TOKENS, row] = inputs[POSITIONS, row] = inputs[SLOTS, row] = 0
        inputs[CELLS, row] = scratch
    for kind in range(len(tables)):
        for row in range(used, rows):
            tables[kind, row, SLOT] = tables[kind, row, SEEN] = 0
        for tile in range(rows + tiles, tables.shape[1]):
            tables[kind, tile, TILE_ROWS] = 0
