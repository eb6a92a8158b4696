"""Draft trees for the requests of a batch, built best first from everything that their sources propose.

A node of a tree is continued in two ways: by the *drafts* that agree with the path so far, and by the *recycled
predictions* after the node's last token or pair of tokens. A token that two sources propose is one candidate. The score
of a candidate is the product of the estimated acceptance probabilities along its path, so the best n candidates always
form trees. The best are those with the highest score times the urgency of their request.

Under sampling a token is argmax(p / noise), and the noise of the next positions is known (noise.py): it is applied to
recycled logits, and counts as evidence for every candidate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.heap import pop, push
from lookfar.core.jit import borrowing_jit, inline_jit, jit
from lookfar.retrieval.off_path import POSITIONS
from lookfar.retrieval.recycle_table import RecycleArrays, RecycleTable
from lookfar.speculation.acceptance import (
    DRAFTS,
    MAX_CHILDREN,
    ONE,
    SOURCE,
    AcceptanceModel,
    to_chances,
)
from lookfar.speculation.candidates import (
    BEFORE,
    COLUMNS,
    COUNT,
    DEPTH,
    EARLIER,
    FIRST,
    HIGH,
    LAST,
    LOW,
    MAX_DEPTH,
    NUM_SOURCES,
    OWNER,
    PARENT,
    PLACE,
    TOKEN,
    TOP_SOURCE,
    BuildLimits,
    Candidates,
    DraftArrays,
    NoiseArrays,
    RootArrays,
)
from lookfar.speculation.evidence import (
    BEST_SOURCE,
    DRAFTED,
    NO_CHILD,
    OWN_FEATURES,
    PROPOSED_BY,
    Children,
    new_children,
    read_drafts,
    read_off_path,
    read_runner_ups,
    read_tables,
    weigh_children,
)

SMALLEST = np.float32(1e-30)  # a score of drafts that are never accepted becomes 0
SAFE_SHARE = 0.2  # of the least acceptance probability: a prediction that had so little before is no candidate


@dataclass(slots=True)
class BuildInputs:
    """Everything that the trees of some requests are built from."""

    drafts: DraftArrays
    roots: RootArrays
    noise: NoiseArrays
    table: RecycleTable
    acceptance: AcceptanceModel


def build_candidates(inputs: BuildInputs, limits: BuildLimits) -> Candidates:
    """Build the best candidates for all requests."""
    arrays = tuple(inputs.drafts), tuple(inputs.roots), tuple(inputs.noise), tuple(inputs.table.arrays)
    return Candidates(*build(arrays, inputs.acceptance.weights, tuple(limits)))


class Workspace(NamedTuple):
    """The arrays that a build works on."""

    nodes: Int32s
    scores: Floats
    values: Floats  # scores times the urgency of the request
    features: Int32s
    order: Int32s  # all drafts; those that agree with a node's path are neighbours
    spare: Int32s  # room for sorting `order`
    group: Int32s  # which child of the node at hand each draft belongs to
    children: Children
    no_noise: Floats  # empty


class Picked(NamedTuple):
    """Room for the best candidates, best first."""

    chosen: Int32s
    scores: Floats
    urgency: Floats
    owners: Int32s


@jit
def build(arrays, weights, limits):  # type: ignore[no-untyped-def]
    """Grow the trees of all requests from one heap. Returns the arrays of `Candidates`."""
    # The arrays come as plain tuples, which numba unpacks in a fifth of the time that named tuples take.
    drafts, roots, noise = DraftArrays(*arrays[0]), RootArrays(*arrays[1]), NoiseArrays(*arrays[2])
    table, limits = RecycleArrays(*arrays[3]), BuildLimits(*limits)
    work = new_workspace(drafts, noise, table, weights, limits)
    most = limits.max_nodes
    heap, taken = np.empty(len(work.scores), np.int32), np.zeros(len(roots.about), np.int32)
    picked = Picked(
        np.empty(most, np.int32), np.empty(most, np.float32), np.empty(most, np.float32), np.empty(most, np.int32)
    )
    used, picks = grow(work, (drafts, roots, noise, table), weights, limits, (heap, taken), picked)
    nodes, scores, features = work.nodes[:used], work.scores[:used], work.features[:used]
    chosen, chosen_scores, urgency, owners = picked
    return nodes, scores, features, chosen[:picks], chosen_scores[:picks], urgency[:picks], owners[:picks]


@borrowing_jit
def grow(work, sources, weights, limits, room, picked):  # type: ignore[no-untyped-def]
    """Expand nodes, best first, and pick them; returns the number of candidates and of those that were picked."""
    drafts, roots, _, _ = sources
    (heap, taken), (chosen, chosen_scores, urgency, owners) = room, picked
    nodes, scores, values, batch = work.nodes, work.scores, work.values, len(roots.about)
    set_roots(work, roots)
    sort_by_owner(work, drafts.owners, batch)
    used, heap_size, picks, next_root = batch, 0, 0, 0
    least_scores, least = limits.least_scores, limits.least_scores[0]
    while next_root < batch or (heap_size and picks < limits.max_nodes):
        if next_root < batch:  # all roots are expanded first
            node = next_root
            next_root += 1
        else:
            node, heap_size = pop(heap, heap_size, values)
            if values[node] < least_scores[min(picks, len(least_scores) - 1)]:
                break  # and so are all that are left
            owner = nodes[node, OWNER]
            if taken[owner] == limits.max_per_request[owner]:
                continue
            chosen[picks], chosen_scores[picks] = node, scores[node]
            owners[picks], urgency[picks] = roots.about[owner, PLACE], roots.urgency[owner]
            picks += 1
            taken[owner] += 1
        if nodes[node, DEPTH] >= roots.about[nodes[node, OWNER], MAX_DEPTH]:
            continue
        count = expand(work, node, used, sources, weights, limits)
        for child in range(used, used + count):
            if values[child] >= least:
                heap_size = push(heap, heap_size, values, child)
        used += count
    return used, picks


@inline_jit
def new_workspace(drafts, noise, table, weights, limits):  # type: ignore[no-untyped-def]
    batch = len(noise.rows)
    size = batch + (limits.max_nodes + batch) * MAX_CHILDREN
    source_count = (len(weights) - DRAFTS) // SOURCE
    # Noise, if it is known, and every source have a feature each.
    noisy = 1 if noise.rows.max() >= 0 and noise.upcoming.shape[1] > 0 else 0
    order = np.empty(len(drafts.tokens), np.int32)
    return Workspace(
        np.empty((size, COLUMNS), np.int32),
        np.empty(size, np.float32),
        np.empty(size, np.float32),
        np.empty((size, OWN_FEATURES + noisy + source_count), np.int32),
        order,
        np.empty_like(order),
        np.empty_like(order),
        new_children(source_count, table.token_ids.shape[1]),
        np.empty(0, np.float32),
    )


@inline_jit
def set_roots(work, roots):  # type: ignore[no-untyped-def]
    """Make the first nodes the roots of all requests."""
    nodes = work.nodes
    for b in range(len(roots.about)):
        nodes[b, OWNER], nodes[b, PARENT], nodes[b, TOKEN], nodes[b, DEPTH] = b, -1, roots.about[b, LAST], 0
        nodes[b, FIRST], nodes[b, COUNT] = -1, 0
        work.scores[b], work.values[b] = ONE, roots.urgency[b]


@inline_jit
def sort_by_owner(work, owners, batch):  # type: ignore[no-untyped-def]
    """Put the drafts of each request side by side in `order`."""
    nodes, order = work.nodes, work.order
    nodes[:batch, HIGH] = 0
    for owner in owners:
        nodes[owner, HIGH] += 1
    start = 0
    for b in range(batch):
        nodes[b, LOW], start = start, start + nodes[b, HIGH]
        nodes[b, HIGH] = nodes[b, LOW]
    for draft in range(len(owners)):
        order[nodes[owners[draft], HIGH]] = draft
        nodes[owners[draft], HIGH] += 1


@inline_jit
def expand(work, node, used, sources, weights, limits):  # type: ignore[no-untyped-def]
    """Add the children of a node as nodes `used …`, with their scores; returns their number."""
    drafts, roots, noise, table = sources
    value = max(work.values[node], SMALLEST)
    vocab_size, min_share = limits.vocab_size, limits.least_scores[0] * np.float32(SAFE_SHARE) / value
    nodes, scores, values, children = work.nodes, work.scores, work.values, work.children
    tokens, child_table, log_odds = children.tokens, children.child_table, children.log_odds
    b, parent, depth = nodes[node, OWNER], nodes[node, PARENT], nodes[node, DEPTH]
    low, high = nodes[node, LOW], nodes[node, HIGH]
    drafted = read_drafts(drafts, work.order[low:high], work.group[low:high], depth, vocab_size, children)
    sort_drafts(work, node, used, drafted)
    sampling = noise_at(noise, b, depth, work.no_noise), noise.temperatures[b]
    path = path_before(nodes, roots.about, node)
    count, evidence = read_tables(table, path, children, drafted, sampling, (min_share, vocab_size))
    if parent < 0:
        row = roots.runner_ups[b], roots.runner_up_logits[b]
        count = read_runner_ups(row, children, count, sampling, vocab_size)
    if depth < POSITIONS:
        count = read_off_path(roots.off_path, (b, depth), children, count, vocab_size)
    nodes[node, FIRST], nodes[node, COUNT] = used, count
    features = work.features[used : used + count]
    weigh_children(children, count, (depth, *evidence), (table, sampling[0]), weights, features)
    scale = to_chances(log_odds, count)
    for child in range(count):
        new = used + child
        nodes[new, OWNER], nodes[new, PARENT], nodes[new, TOKEN] = b, node, tokens[child]
        nodes[new, DEPTH], nodes[new, FIRST], nodes[new, COUNT] = depth + 1, -1, 0
        nodes[new, TOP_SOURCE] = child_table[child, BEST_SOURCE]
        nodes[new, NUM_SOURCES] = child_table[child, PROPOSED_BY]
        if child >= drafted:
            nodes[new, LOW] = nodes[new, HIGH] = 0
        tokens[child] = NO_CHILD
        chance = scale * log_odds[child]
        scores[new], values[new] = scores[node] * chance, values[node] * chance
    return count


@inline_jit
def path_before(nodes, about, node):  # type: ignore[no-untyped-def]
    """Return the last three tokens up to a node, -1 for none."""
    b, parent, earlier = nodes[node, OWNER], nodes[node, PARENT], np.int32(-1)
    before = about[b, BEFORE]
    if parent >= 0:
        above, before = nodes[parent, PARENT], nodes[parent, TOKEN]
        earlier = nodes[above, TOKEN] if above >= 0 else about[b, BEFORE]
    elif about.shape[1] > EARLIER:
        earlier = about[b, EARLIER]
    return earlier, before, nodes[node, TOKEN]


@inline_jit
def noise_at(noise, b, depth, unknown):  # type: ignore[no-untyped-def]
    """Return the noise of a request `depth` tokens ahead, or `unknown`."""
    positions = noise.upcoming.shape[1]
    if noise.rows[b] < 0 or depth >= positions // 2:
        return unknown
    return noise.upcoming[noise.rows[b], (noise.positions[b] + depth) % positions]


@inline_jit
def sort_drafts(work, node, used, count):  # type: ignore[no-untyped-def]
    """Sort the drafts of a node by child, so that the drafts of each child are neighbours in `order`."""
    nodes, child_table = work.nodes, work.children.child_table
    low, start = nodes[node, LOW], nodes[node, LOW]
    for child in range(count):
        nodes[used + child, LOW] = nodes[used + child, HIGH] = start
        start += child_table[child, DRAFTED]
    for i in range(low, nodes[node, HIGH]):
        if work.group[i] >= 0:
            child = used + work.group[i]
            work.spare[nodes[child, HIGH]] = work.order[i]
            nodes[child, HIGH] += 1
    for i in range(low, start):
        work.order[i] = work.spare[i]
