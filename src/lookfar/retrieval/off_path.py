"""Off-path predictions: what the last step predicted for the next positions on branches that were not accepted.

A rejected draft token is often a near miss, and what the model expects behind it is likely behind the accepted token
too. So the predictions of rejected rows are merged by position. Each row counts by the probability that the model gave
to its path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.atomics import CACHE_LINE
from lookfar.core.jit import inline_jit
from lookfar.core.tree import DEPTH, PARENT, TOKEN

POSITIONS = 3  # after the last token of the text
PER_POSITION = 16  # tokens kept for each
MASSES = 3  # kinds of positions, by the probability of all their rows together
CLASSES = 10  # of a token, by its share of that probability
MASS_BOUNDS: Floats = np.array([0.05, 0.3], np.float32)
SHARE_BOUNDS: Floats = np.array([0.7, 0.45, 0.28, 0.17, 0.1, 0.06, 0.035, 0.02, 0.01], np.float32)
LEAST = np.float32(1e-3)  # probability of a path, and of a token behind it, to be merged
TOKENS, KINDS = range(2)  # of merged predictions: tokens, and 1 + mass * CLASSES + class; 0 for none
LINE = CACHE_LINE // 4  # numbers on a cache line
ROOM = 128  # different tokens that are merged for a position


class MergeRoom(NamedTuple):
    """The arrays that a merge works on."""

    tokens: Int32s  # [positions, ROOM]
    scores: Floats
    sizes: Int32s  # [positions or more]
    masses: Floats  # [positions or more]
    paths: Floats  # [nodes of a tree or more]
    totals: Floats  # [1 + nodes or more]


@inline_jit
def new_merge_room(nodes, parts):  # type: ignore[no-untyped-def]
    """Return room for trees of at most so many nodes in every part of the work, on cache lines of their own."""
    return MergeRoom(
        np.empty((parts, POSITIONS, ROOM), np.int32),
        np.empty((parts, POSITIONS, ROOM), np.float32),
        np.zeros((parts, POSITIONS + 2 * LINE), np.int32),
        np.zeros((parts, POSITIONS + 2 * LINE), np.float32),
        np.empty((parts, nodes + 2 * LINE), np.float32),
        np.empty((parts, nodes + 2 * LINE), np.float32),
    )


@inline_jit
def room_of(room, part):  # type: ignore[no-untyped-def]
    """Return the room of one part."""
    tokens, scores, sizes, masses, paths, totals = room
    return MergeRoom(tokens[part], scores[part], sizes[part], masses[part], paths[part], totals[part])


@inline_jit
def total_of(logits):  # type: ignore[no-untyped-def]
    """Return the sum of probabilities, in units of the most likely one."""
    total = np.float32(0.0)
    for logit in logits:
        total += np.exp(logit - logits[0])
    return total


@inline_jit
def find_paths(nodes, top, first_row, last, room):  # type: ignore[no-untyped-def]
    """Return the probability of the path to each node of a tree, 1 for accepted ones, 0 for unlikely ones.

    `first_row` is the row of the first node, and `last` the last accepted node, -1 for none.
    """
    top_ids, top_logits = top
    count, paths, totals = nodes.shape[1], room.paths, room.totals
    totals[0] = 0.0
    for node in range(count):
        paths[node], totals[node + 1] = 0.0, 0.0
    node = last
    while node >= 0:
        paths[node] = 1.0
        node = nodes[PARENT, node]
    for node in range(count):
        parent = nodes[PARENT, node]
        before = paths[parent] if parent >= 0 else np.float32(1.0)
        if paths[node] == 1.0 or before < LEAST:
            continue
        row = first_row + parent
        for j in range(top_ids.shape[1]):
            if top_ids[row, j] == nodes[TOKEN, node]:
                if totals[parent + 1] == 0.0:
                    totals[parent + 1] = total_of(top_logits[row])
                paths[node] = before * np.exp(top_logits[row, j] - top_logits[row, 0]) / totals[parent + 1]
                break
    return paths


@inline_jit
def add_row(room, position, top, row, path):  # type: ignore[no-untyped-def]
    """Add the predictions of a row to those of its position."""
    tokens, scores, sizes, masses, _, _ = room
    top_ids, top_logits = top
    masses[position] += path
    scale = path / total_of(top_logits[row])
    for j in range(top_ids.shape[1]):
        token, score = top_ids[row, j], scale * np.exp(top_logits[row, j] - top_logits[row, 0])
        if token < 0 or score < LEAST:
            break
        place, size = 0, sizes[position]
        while place < size and tokens[position, place] != token:
            place += 1
        if place == ROOM:
            break
        if place == size:
            sizes[position] = size + 1
            tokens[position, place], scores[position, place] = token, 0.0
        scores[position, place] += score


@inline_jit
def keep_best(room, position, merged):  # type: ignore[no-untyped-def]
    """Write the tokens of a position with the highest scores to `merged`, [2, positions, k], and clear the room."""
    tokens, scores, size, mass = room[0][position], room[1][position], room[2][position], room[3][position]
    kind = 0 if mass < MASS_BOUNDS[0] else 1 if mass < MASS_BOUNDS[1] else 2
    for place in range(min(PER_POSITION, size)):
        best = place
        for i in range(place + 1, size):
            if scores[i] > scores[best]:
                best = i
        token, share, level = tokens[best], scores[best] / mass, 0
        tokens[best], scores[best] = tokens[place], scores[place]
        while level < CLASSES - 1 and share < SHARE_BOUNDS[level]:
            level += 1
        merged[TOKENS, position, place], merged[KINDS, position, place] = token, 1 + kind * CLASSES + level
    room[2][position], room[3][position] = 0, 0.0


@inline_jit
def merge_off_path(merged, nodes, top, rows, room):  # type: ignore[no-untyped-def]
    """Merge the predictions of the rows of a tree that were not accepted.

    `merged` is [2, POSITIONS, PER_POSITION] and gets the result. `nodes` are the columns of the tree; `rows` are the
    row of its first node, and the last accepted node, -1 for none.
    """
    first_row, last = rows
    for position in range(POSITIONS):
        for place in range(PER_POSITION):
            merged[TOKENS, position, place], merged[KINDS, position, place] = 0, 0
    if not nodes.shape[1]:
        return
    paths = find_paths(nodes, top, first_row, last, room)
    depth = nodes[DEPTH, last] if last >= 0 else 0
    for node in range(nodes.shape[1]):
        position = nodes[DEPTH, node] - depth - 1
        if 0 <= position < POSITIONS and paths[node] >= LEAST:
            add_row(room, position, top, first_row + node, paths[node])
    for position in range(POSITIONS):
        keep_best(room, position, merged)
