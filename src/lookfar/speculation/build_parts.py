"""The workspace of a build of draft trees, and the parts into which it is divided for several threads.

Each part grows the trees of some requests from a heap of its own and picks candidates, best first. The picks of all
parts are then merged: first every part may pick its fair share, as far as it seems to pay, and those whose next
candidate is among the best of all go on. So the result is that of one heap for all requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.jit import inline_jit, jit
from lookfar.speculation.acceptance import DRAFTS, MAX_CHILDREN, SOURCE
from lookfar.speculation.candidates import COLUMNS, FIRST
from lookfar.speculation.evidence import LINE, OWN_FEATURES, Children, new_children


class Workspace(NamedTuple):
    """The arrays that a build works on."""

    nodes: Int32s  # the roots of all requests, then room for each part
    scores: Floats
    values: Floats  # scores times the urgency of the request
    features: Int32s
    order: Int32s  # all drafts; those that agree with a node's path are neighbours
    spare: Int32s  # room for sorting `order`
    group: Int32s  # which child of the node at hand each draft belongs to
    children: Children  # of each part
    no_noise: Floats  # empty


class Parts(NamedTuple):
    """The requests of a build in parts, which grow at the same time, and what each part has picked so far."""

    # By the number of picks of a part, a value below which its next candidate is not expected to be chosen: as if the
    # other parts had as many.
    bounds: Floats
    state: Int32s  # [parts, columns below]
    heaps: Int32s  # [parts, room for nodes]
    picked: Int32s  # [parts, max_nodes] nodes, best first
    taken: Int32s  # [requests] the candidates of each


# Columns about a part: the next root to expand and the one behind its last, the next node to make, the nodes in its
# heap, its picks, and how many it may have at present. The rest keeps parts on cache lines of their own.
NEXT_ROOT, END_ROOT, NEXT_NODE, HEAP_SIZE, PICKS, MOST = range(6)
PART_COLUMNS = 2 * LINE


@inline_jit
def new_workspace(sources, weights, limits, count):  # type: ignore[no-untyped-def]
    """Return the arrays for a build in so many parts."""
    drafts, noise, table = sources
    batch, most = len(noise.rows), limits.max_nodes
    room = (most + -(-batch // count)) * MAX_CHILDREN  # of a part: it may have all of the best candidates
    size = batch + count * room
    source_count = (len(weights) - DRAFTS) // SOURCE
    # Noise, if it is known, and every source have a feature each.
    noisy = 1 if noise.rows.max() >= 0 and noise.upcoming.shape[1] > 0 else 0
    order = np.empty(len(drafts.tokens), np.int32)
    work = Workspace(
        np.empty((size, COLUMNS), np.int32),
        np.empty(size, np.float32),
        np.empty(size, np.float32),
        np.empty((size, OWN_FEATURES + noisy + source_count), np.int32),
        order,
        np.empty_like(order),
        np.empty_like(order),
        new_children(source_count, table.token_ids.shape[1], count),
        np.empty(0, np.float32),
    )
    state = np.zeros((count, PART_COLUMNS), np.int32)
    for part in range(count):
        state[part, NEXT_ROOT], state[part, END_ROOT] = part * batch // count, (part + 1) * batch // count
        state[part, NEXT_NODE], state[part, MOST] = batch + part * room, -(-most // count)
    heaps, picked = np.empty((count, room), np.int32), np.empty((count, most), np.int32)
    return work, Parts(bounds_of(limits, count), state, heaps, picked, np.zeros(batch, np.int32))


@jit
def bounds_of(limits, count):  # type: ignore[no-untyped-def]
    least_scores = limits.least_scores
    bounds = np.zeros(1 + (len(least_scores) - 1) // count, np.float32)
    for chosen in range(len(least_scores)):
        bounds[chosen // count] = max(bounds[chosen // count], least_scores[chosen])
    return bounds


@jit
def merge(values, parts, limits, chosen):  # type: ignore[no-untyped-def]
    """Choose the best of what all parts have picked, best first; returns their number."""
    state, picked, least_scores = parts.state, parts.picked, limits.least_scores
    for part in range(len(state)):
        state[part, MOST] = 0  # picks that were chosen
    for count in range(len(chosen)):
        best, value = -1, np.float32(-1.0)
        for part in range(len(state)):
            at = state[part, MOST]
            if at < state[part, PICKS] and values[picked[part, at]] > value:
                best, value = part, values[picked[part, at]]
        if best < 0 or value < least_scores[min(count, len(least_scores) - 1)]:
            return count
        chosen[count] = picked[best, state[best, MOST]]
        state[best, MOST] += 1
    return len(chosen)


@jit
def go_on(values, parts, limits, floor, chosen):  # type: ignore[no-untyped-def]
    """Let parts go on to candidates that would be among the `chosen` ones; returns whether there are any."""
    picks, least_scores, heaps = len(chosen), limits.least_scores, parts.heaps
    floor[0] = least_scores[min(picks, len(least_scores) - 1)]
    if picks == limits.max_nodes:
        floor[0] = values[chosen[-1]] if picks else np.float32(np.inf)
    elif picks:
        floor[0] = min(floor[0], values[chosen[-1]])
    parts.state[:, MOST], parts.bounds[:] = limits.max_nodes, 0.0
    goes_on = False
    for part in range(len(parts.state)):
        state = parts.state[part]
        if state[HEAP_SIZE] and state[PICKS] < limits.max_nodes:
            value = values[heaps[part, 0]]
            goes_on = goes_on or value > floor[0] or (value == floor[0] and picks < limits.max_nodes)
    return goes_on


@jit
def forget_others(nodes, parts):  # type: ignore[no-untyped-def]
    """Drop the children of picks that were not chosen, as if those had not been expanded."""
    for part in range(len(parts.state)):
        for i in range(parts.state[part, MOST], parts.state[part, PICKS]):
            nodes[parts.picked[part, i], FIRST] = -1
