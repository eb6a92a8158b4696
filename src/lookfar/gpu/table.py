"""Who sees whom in a step of packed rows, in a few integers for each row: what attention takes instead of a mask.

The rows of all sequences lie side by side. A row sees the keys at positions `LOW … SEEN − 1` of its own text. Those
before `DIRECT` lie in the cell of their position; from there on, along a branch of a tree, the row's `PATH` says which
cell holds them. Behind the rows come the tiles: neighbouring rows of one sequence that attend together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from lookfar.arrays import Int32s, Ints
from lookfar.jit import jit
from lookfar.tree import SequencePlan

NEAR = 32  # the most keys of a path; also where attention parts near keys from far ones
TILE_SIZE = 16  # the most rows of a tile
SLOT, DIRECT, SEEN, LOW, PATH = 0, 1, 2, 3, 4  # columns of a row
TILE_FIRST, TILE_ROWS, TILE_SLOT, TILE_SEEN, TILE_LOW = 0, 1, 2, 3, 4  # columns of a tile: the most seen, the lowest
WIDTH = PATH + NEAR
TOKENS, POSITIONS, SLOTS, CELLS = 0, 1, 2, 3  # rows of the inputs, which have a column for each packed row


def tiles_for(rows: int, batch: int) -> int:
    """The most tiles that so many rows of so many sequences can come to."""
    return min(rows, -(-rows // TILE_SIZE) + batch - 1)


def fill(
    plans: Seq[SequencePlan], first_slot: int, inputs: Ints, tables: Int32s, windows: Int32s, scratch: int
) -> bool:
    """Write a step into its buffers; padding goes to the cell `scratch` and sees nothing.

    `tables` holds one table for each kind of layer, whose window and chunk (0: none) are in `windows`. False if a row
    sees something else than the text and one short path behind it.
    """
    row = tile = 0
    for i, rows in enumerate(plans):
        tree, riders, slot = rows.tree, sum(map(len, rows.riders)) if rows.riders else 0, first_slot + i
        if not describe(tables, windows, inputs, slot, rows.cached, rows.chain, tree.tokens, tree.parents, riders, row):
            return False
        if riders:
            start = len(rows.chain) + len(tree)
            inputs[TOKENS, row + start : row + len(rows)] = rows.tokens[start:]
            inputs[POSITIONS, row + start : row + len(rows)] = rows.positions[start:]
            for of_one in rows.riders:
                direct = rows.cached + len(rows.chain)
                if not ride(
                    tables, windows, of_one.sees, of_one.offsets, slot, direct, row + start, start, rows.cached
                ):
                    return False
                start += len(of_one)
        tile = lay_tiles(tables, inputs.shape[1], slot, row, len(rows), tile)
        row += len(rows)
    finish(inputs, tables, row, tile, scratch)
    return True


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
    tables, windows, inputs, slot, cached, chain, tokens, parents, riders, first
):
    """The chain and the tree of one sequence, whose rows begin at `first`. False if the tree is too deep."""
    count = len(chain) + len(tokens) + riders
    for r in range(count):
        inputs[SLOTS, first + r] = slot
        inputs[CELLS, first + r] = cached + r
    for r in range(len(chain)):
        inputs[TOKENS, first + r] = chain[r]
        inputs[POSITIONS, first + r] = cached + r
        see(tables, windows, first + r, slot, cached + r + 1, cached + r + 1)
    direct, start = cached + len(chain), first + len(chain)
    for node in range(len(tokens)):
        row, above, depth = start + node, start + parents[node], 1
        if parents[node] >= 0:
            depth = tables[0, above, SEEN] - direct + 1
            if depth > NEAR:
                return False
        inputs[TOKENS, row] = tokens[node]
        inputs[POSITIONS, row] = direct + depth - 1
        for kind in range(len(tables)):
            for d in range(depth - 1):
                tables[kind, row, PATH + d] = tables[kind, above, PATH + d]
            tables[kind, row, PATH + depth - 1] = direct + node
        see(tables, windows, row, slot, direct, direct + depth)
    return True


@jit
def lay_tiles(tables, rows, slot, first, count, tile):  # type: ignore[no-untyped-def]
    """The tiles of one sequence, from `tile` on. Returns the next one."""
    for start in range(first, first + count, TILE_SIZE):
        end = min(start + TILE_SIZE, first + count)
        for kind in range(len(tables)):
            seen, low = 0, tables[kind, start, LOW]
            for row in range(start, end):
                seen, low = max(seen, tables[kind, row, SEEN]), min(low, tables[kind, row, LOW])
            about = tables[kind, rows + tile]
            about[TILE_FIRST], about[TILE_ROWS], about[TILE_SLOT] = start, end - start, slot
            about[TILE_SEEN], about[TILE_LOW] = seen, low
        tile += 1
    return tile


@jit
def ride(tables, windows, sees, offsets, slot, direct, first, start, cached):  # type: ignore[no-untyped-def]
    """Riders from row `first` on see their paths. False if one does not see a key at every position up to its own."""
    for rider in range(len(sees)):
        row, depth = first + rider, 0
        for other in range(len(sees)):
            if sees[rider, other]:
                if depth == NEAR or offsets[other] != depth + 1:
                    return False
                for kind in range(len(tables)):
                    tables[kind, row, PATH + depth] = cached + start + other
                depth += 1
        if offsets[rider] != depth:
            return False
        see(tables, windows, row, slot, direct, direct + depth)
    return True


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
            tables[kind, tile, TILE_ROWS] = tables[kind, tile, TILE_SEEN] = 0
