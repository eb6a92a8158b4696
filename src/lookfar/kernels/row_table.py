"""The row table of a flat step: the keys that each row attends to, in a few integers instead of a mask.

The rows of all requests lie side by side. A row sees the keys at positions WINDOW_START … KV_LEN − 1 of its own text.
Keys before PREFIX_LEN lie at their position in the request's slot; from there on, along a branch of a draft tree, the
row's TREE_PATH holds their positions in the slot. Behind the rows come the tiles: neighbouring rows of one request that
attend together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Int32s, Ints
from lookfar.core.jit import inline_jit, jit
from lookfar.core.plan import (
    FIRST_NODE,
    FIRST_PENDING,
    NUM_CACHED,
    NUM_NODES,
    NUM_PENDING,
    NUM_WINDOW,
    RequestPlan,
    StepPlan,
)

MAX_PATH = 32  # the longest tree path; also where attention separates near keys from far ones
TILE_SIZE = 16  # the most rows of a tile
SLOT, PREFIX_LEN, KV_LEN, WINDOW_START, TREE_PATH = 0, 1, 2, 3, 4  # columns of a row
TILE_FIRST, TILE_ROWS, TILE_SLOT, TILE_KV_LEN, TILE_WINDOW_START = 0, 1, 2, 3, 4  # columns of a tile
WIDTH = TREE_PATH + MAX_PATH
TOKENS, POSITIONS, SLOTS, KV_POSITIONS = 0, 1, 2, 3  # rows of the inputs, which have one column for each row


def max_tiles(rows: int, batch: int) -> int:
    """Return the most tiles that so many rows of so many requests can come to."""
    return min(rows, -(-rows // TILE_SIZE) + batch - 1)


class StepArrays(NamedTuple):
    """The host buffers of a step."""

    inputs: Ints  # [4, rows]
    tables: Int32s  # [kinds of layers, rows + tiles, WIDTH]
    windows: Int32s  # [kinds of layers, 2] sliding window and chunk, 0 for none


@dataclass(frozen=True)
class RowTable:
    """Fills the host buffers of a step. Padding rows write to the KV position `spare` and see nothing."""

    arrays: StepArrays
    spare: int

    def fill(self, plan: StepPlan, slots: Seq[int]) -> bool:
        """Write a step into the buffers; False if a row sees something else than a prefix and one short path."""
        arrays, of_request = tuple(self.arrays), np.array(slots, np.int64)
        if not describe_step(arrays, tuple(plan.flat), of_request):
            return False
        if plan.has_windows:
            row = 0
            for rows, slot in zip(plan.requests, slots, strict=True):
                if rows.windows and not self._fill_windows(rows, (slot, rows.num_cached, row)):
                    return False
                row += len(rows)
        tiles = lay_tiles(arrays, plan.flat.about, of_request)
        pad(arrays, sum(plan.lengths), tiles, self.spare)
        return True

    def clear(self) -> None:
        """Describe a step of nothing but padding."""
        pad(tuple(self.arrays), 0, 0, self.spare)

    def _fill_windows(self, rows: RequestPlan, where: tuple[int, int, int]) -> bool:
        """Describe the window rows of a request; `where` is its slot, what it has cached, and its first row."""
        start = len(rows.pending) + len(rows.tree)
        columns = slice(where[2] + start, where[2] + len(rows))
        self.arrays.inputs[TOKENS, columns] = rows.tokens[start:]
        self.arrays.inputs[POSITIONS, columns] = rows.positions[start:]
        for window in rows.windows:
            if not describe_window(tuple(self.arrays), where, len(rows.pending), start, window.sees, window.offsets):
                return False
            start += len(window)
        return True


@jit
def set_visible(tables, windows, row, slot, prefix_len, kv_len):  # type: ignore[no-untyped-def]
    """Let a row see the first `kv_len` positions of its text, as far as each kind of layer looks back."""
    for kind in range(len(tables)):
        entry = tables[kind, row]
        entry[SLOT], entry[PREFIX_LEN], entry[KV_LEN] = slot, prefix_len, kv_len
        window, chunk = windows[kind]
        start = max(kv_len - window, 0) if window else 0
        entry[WINDOW_START] = max(start, (kv_len - 1) // chunk * chunk) if chunk else start


@jit
def describe_step(arrays, plan, slots):  # type: ignore[no-untyped-def]
    """Describe the pending tokens and the trees of all requests; False if a tree is too deep."""
    about, pending, nodes = plan
    first = 0
    for i in range(len(about)):
        own, own_nodes = about[i], nodes[:, about[i, FIRST_NODE] : about[i, FIRST_NODE] + about[i, NUM_NODES]]
        where = slots[i], own[NUM_CACHED], first
        tokens = pending[own[FIRST_PENDING] : own[FIRST_PENDING] + own[NUM_PENDING]]
        if not describe_rows(arrays, where, tokens, own_nodes[0], own_nodes[1], own[NUM_WINDOW]):
            return False
        first += own[NUM_PENDING] + own[NUM_NODES] + own[NUM_WINDOW]
    return True


@inline_jit
def describe_rows(arrays, where, pending, tokens, parents, window):  # type: ignore[no-untyped-def]
    """Describe the pending tokens and the tree of one request; `where` is its slot, what it has cached, its first row.

    False if the tree is too deep.
    """
    inputs, tables, windows = arrays
    slot, num_cached, first = where
    for r in range(len(pending) + len(tokens) + window):
        inputs[SLOTS, first + r] = slot
        inputs[KV_POSITIONS, first + r] = num_cached + r
    for r in range(len(pending)):
        inputs[TOKENS, first + r] = pending[r]
        inputs[POSITIONS, first + r] = num_cached + r
        set_visible(tables, windows, first + r, slot, num_cached + r + 1, num_cached + r + 1)
    prefix_len, start = num_cached + len(pending), first + len(pending)
    for node in range(len(tokens)):
        row, parent, depth = start + node, start + parents[node], 1
        if parents[node] >= 0:
            depth = tables[0, parent, KV_LEN] - prefix_len + 1
            if depth > MAX_PATH:
                return False
        inputs[TOKENS, row] = tokens[node]
        inputs[POSITIONS, row] = prefix_len + depth - 1
        for kind in range(len(tables)):
            for d in range(depth - 1):
                tables[kind, row, TREE_PATH + d] = tables[kind, parent, TREE_PATH + d]
            tables[kind, row, TREE_PATH + depth - 1] = prefix_len + node
        set_visible(tables, windows, row, slot, prefix_len, prefix_len + depth)
    return True


@jit
def describe_window(arrays, where, pending, start, sees, offsets):  # type: ignore[no-untyped-def]
    """Describe window rows from the request's row `start` on.

    False if one of them does not see exactly one key at every position up to its own.
    """
    _, tables, windows = arrays
    slot, num_cached, first = where
    prefix_len = num_cached + pending
    for i in range(len(sees)):
        row, depth = first + start + i, 0
        for other in range(len(sees)):
            if sees[i, other]:
                if depth == MAX_PATH or offsets[other] != depth + 1:
                    return False
                for kind in range(len(tables)):
                    tables[kind, row, TREE_PATH + depth] = num_cached + start + other
                depth += 1
        if offsets[i] != depth:
            return False
        set_visible(tables, windows, row, slot, prefix_len, prefix_len + depth)
    return True


@jit
def lay_tiles(arrays, about, slots):  # type: ignore[no-untyped-def]
    """Describe the tiles of all requests. Returns their number."""
    inputs, tables, _ = arrays
    first = tile = 0
    for i in range(len(about)):
        count = about[i, NUM_PENDING] + about[i, NUM_NODES] + about[i, NUM_WINDOW]
        for start in range(first, first + count, TILE_SIZE):
            end = min(start + TILE_SIZE, first + count)
            for kind in range(len(tables)):
                kv_len, window_start = 0, tables[kind, start, WINDOW_START]
                for row in range(start, end):
                    kv_len = max(kv_len, tables[kind, row, KV_LEN])
                    window_start = min(window_start, tables[kind, row, WINDOW_START])
                entry = tables[kind, inputs.shape[1] + tile]
                entry[TILE_FIRST], entry[TILE_ROWS], entry[TILE_SLOT] = start, end - start, slots[i]
                entry[TILE_KV_LEN], entry[TILE_WINDOW_START] = kv_len, window_start
            tile += 1
        first += count
    return tile


@jit
def pad(arrays, used, tiles, spare):  # type: ignore[no-untyped-def]
    """Describe the unused rows and tiles."""
    inputs, tables, _ = arrays
    rows = inputs.shape[1]
    for row in range(used, rows):
        inputs[TOKENS, row] = inputs[POSITIONS, row] = inputs[SLOTS, row] = 0
        inputs[KV_POSITIONS, row] = spare
    for kind in range(len(tables)):
        for row in range(used, rows):
            tables[kind, row, SLOT] = tables[kind, row, KV_LEN] = 0
        for tile in range(rows + tiles, tables.shape[1]):
            tables[kind, tile, TILE_ROWS] = tables[kind, tile, TILE_KV_LEN] = 0


def step_arrays(inputs: Ints, tables: Int32s, windows: Seq[tuple[int, int]]) -> StepArrays:
    """Group the buffers of a step with the windows of its kinds of layers."""
    return StepArrays(inputs, tables, np.array(windows, np.int32).reshape(-1, 2))
