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

import numpy as np

from lookfar.core.heap import pop, push
from lookfar.core.host_team import ALONE, Team, job_of, run_parts
from lookfar.core.jit import borrowing_jit, inline_jit, jit
from lookfar.retrieval.off_path import POSITIONS
from lookfar.retrieval.recycle_table import RecycleArrays, RecycleTable
from lookfar.speculation.acceptance import (
    ONE,
    AcceptanceModel,
    to_chances,
)
from lookfar.speculation.build_parts import (
    END_ROOT,
    HEAP_SIZE,
    MOST,
    NEXT_NODE,
    NEXT_ROOT,
    PICKS,
    forget_others,
    go_on,
    merge,
    new_workspace,
)
from lookfar.speculation.candidates import (
    BEFORE,
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
    PROPOSED_BY,
    children_of,
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


def build_candidates(inputs: BuildInputs, limits: BuildLimits, team: Team = ALONE) -> Candidates:
    """Build the best candidates for all requests, on the threads of a team.

    With several threads, what lies between the candidates of their parts is undefined.
    """
    arrays = tuple(inputs.drafts), tuple(inputs.roots), tuple(inputs.noise), tuple(inputs.table.arrays)
    return Candidates(*build(arrays, inputs.acceptance.weights, tuple(limits), team))


@jit
def build(arrays, weights, limits, team):  # type: ignore[no-untyped-def]
    """Grow the trees of all requests, best first. Returns the arrays of `Candidates`.

    `team` is the address of the threads that grow parts of the requests, and the number of parts: first their fair
    share of the candidates, then what may still be among the best of all. The result does not depend on the parts.
    """
    # The arrays come as plain tuples, which numba unpacks in a fifth of the time that named tuples take.
    drafts, roots, noise = DraftArrays(*arrays[0]), RootArrays(*arrays[1]), NoiseArrays(*arrays[2])
    table, limits = RecycleArrays(*arrays[3]), BuildLimits(*limits)
    threads, count = team
    work, parts = new_workspace((drafts, noise, table), weights, limits, count)
    set_roots(work, roots)
    sort_by_owner(work, drafts.owners, len(roots.about))
    floor, chosen = np.zeros(1, np.float32), np.empty(limits.max_nodes, np.int32)
    data = (work, parts, floor), (drafts, roots, noise, table), weights, limits
    run_parts(threads, count, job_of(grow_part, data))
    picks = merge(work.values, parts, limits, chosen)
    while count > 1 and go_on(work.values, parts, limits, floor, chosen[:picks]):
        run_parts(threads, count, job_of(grow_part, data))
        picks = merge(work.values, parts, limits, chosen)
    forget_others(work.nodes, parts)
    urgency, owners = np.empty(picks, np.float32), np.empty(picks, np.int32)
    scores = np.empty(picks, np.float32)
    for i in range(picks):
        node = chosen[i]
        owner = work.nodes[node, OWNER]
        scores[i], urgency[i], owners[i] = work.scores[node], roots.urgency[owner], roots.about[owner, PLACE]
    used = parts.state[count - 1, NEXT_NODE]
    return work.nodes[:used], work.scores[:used], work.features[:used], chosen[:picks], scores, urgency, owners


@borrowing_jit
def grow_part(data, part):  # type: ignore[no-untyped-def]
    """Expand nodes of the requests of a part, best first, and pick them, while they may be among the best of all."""
    (work, parts, floor), sources, weights, limits = data
    _, roots, _, _ = sources
    state, heap, picked, taken = parts.state[part], parts.heaps[part], parts.picked[part], parts.taken
    nodes, values = work.nodes, work.values
    children = children_of(work.children, part)
    bounds, least = parts.bounds, limits.least_scores[0]
    next_root, used, heap_size, picks = state[NEXT_ROOT], state[NEXT_NODE], state[HEAP_SIZE], state[PICKS]
    while next_root < state[END_ROOT] or (heap_size and picks < state[MOST]):
        if next_root < state[END_ROOT]:  # all roots are expanded first
            node = next_root
            next_root += 1
        else:
            best = values[heap[0]]
            if best < bounds[min(picks, len(bounds) - 1)] or best < floor[0]:
                break  # and so are all that are left
            node, heap_size = pop(heap, heap_size, values)
            owner = nodes[node, OWNER]
            if taken[owner] == limits.max_per_request[owner]:
                continue
            picked[picks] = node
            picks += 1
            taken[owner] += 1
        if nodes[node, DEPTH] >= roots.about[nodes[node, OWNER], MAX_DEPTH]:
            continue
        count = expand((work, children), node, used, sources, weights, limits)
        for child in range(used, used + count):
            if values[child] >= least:
                heap_size = push(heap, heap_size, values, child)
        used += count
    state[NEXT_ROOT], state[NEXT_NODE], state[HEAP_SIZE], state[PICKS] = next_root, used, heap_size, picks


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
def expand(room, node, used, sources, weights, limits):  # type: ignore[no-untyped-def]
    """Add the children of a node as nodes `used …`, with their scores; returns their number.

    `room` is the workspace, and the children of its part.
    """
    drafts, roots, noise, table = sources
    work, children = room
    value = max(work.values[node], SMALLEST)
    vocab_size, min_share = limits.vocab_size, limits.least_scores[0] * np.float32(SAFE_SHARE) / value
    nodes, scores, values = work.nodes, work.scores, work.values
    tokens, child_table, log_odds = children.tokens, children.child_table, children.log_odds
    b, parent, depth = nodes[node, OWNER], nodes[node, PARENT], nodes[node, DEPTH]
    low, high = nodes[node, LOW], nodes[node, HIGH]
    drafted = read_drafts(drafts, work.order[low:high], work.group[low:high], depth, vocab_size, children)
    sort_drafts(room, node, used, drafted)
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
def sort_drafts(room, node, used, count):  # type: ignore[no-untyped-def]
    """Sort the drafts of a node by child, so that the drafts of each child are neighbours in `order`."""
    work, children = room
    nodes, child_table = work.nodes, children.child_table
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
