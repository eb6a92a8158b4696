"""Splitting a step over ranks: branches of the draft trees, and columns of lookahead windows.

Every rank feeds the pending tokens that it has not cached yet, so every rank has the last token of the text. A leaf of
a draft tree goes to one rank, with the path to it; a window row whose choice is wanted goes to one rank, with the rows
that it sees. Neighbouring leaves share most of their paths, so leaves are taken in depth-first order and cut into one
run for each rank, such that the rank with the most rows has as few as possible.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Bools, Ints
from lookfar.core.jit import jit
from lookfar.core.plan import RequestPlan, StepPlan, WindowRows
from lookfar.core.tree import NO_TREE, DraftTree


@dataclass(eq=False)
class RankShare:
    """The rows of a step that one rank computes."""

    plan: StepPlan
    rows: list[Ints]  # of each request: which rows of the whole step, ascending
    reported: list[Ints]  # of each request: which of its own rows this rank reports the results of
    places: Ints  # where these results belong among the rows of the whole step


def split_step(plan: StepPlan, cached: Ints) -> list[RankShare]:
    """Split a step; `cached` is the number of tokens that each rank has cached, [ranks, batch].

    Each rank has to lack at least the last token of each request.
    """
    ends = np.cumsum(plan.num_rows)
    starts = ends - plan.num_rows
    pending = np.array([len(rows.pending) for rows in plan.requests])
    skipped = cached - plan.num_cached  # [ranks, batch] leading pending rows that a rank need not feed
    held: Bools = np.zeros((len(cached), int(ends[-1])), bool)  # [ranks, all rows]
    for place, start in enumerate(starts.tolist()):
        for rank, skip in enumerate(skipped[:, place].tolist()):
            held[rank, start + skip : start + pending[place]] = True
    rows, last = units_of(plan, starts)
    if len(last):
        hold(held, rows, last, share_units(rows, last, (pending - skipped).sum(1), held.shape[1]))
    owner = np.where(held.any(0), held.argmax(0), -1)  # the first rank that holds a row
    wanted = np.concatenate([rows.needs_logits for rows in plan.requests])
    shares = []
    for rank in range(len(cached)):
        reported = wanted & (owner == rank)
        own = [np.flatnonzero(held[rank, start:end]) for start, end in zip(starts, ends, strict=True)]
        report = [np.flatnonzero(reported[start:end][rows]) for start, end, rows in zip(starts, ends, own, strict=True)]
        parts = [
            part_of(whole, rows, int(cached[rank, place]), rows[said])
            for place, (whole, rows, said) in enumerate(zip(plan.requests, own, report, strict=True))
        ]
        share = StepPlan(parts, plan.top_k)
        share.prefills, share.hidden, share.shared = plan.prefills, plan.hidden, plan.shared
        shares.append(RankShare(share, own, report, np.flatnonzero(reported)))
    return shares


def units_of(plan: StepPlan, starts: Ints) -> tuple[Ints, Ints]:
    """Return what goes to one rank together: rows of the whole step, and where the rows of each unit end."""
    rows, ends, count = [], [], 0
    for whole, start in zip(plan.requests, starts.tolist(), strict=True):
        found: list[tuple[Ints, Ints]] = []
        if len(whole.tree):
            nodes, last = branches(whole.tree.parents, int(whole.tree.depths.sum()))
            found.append((nodes + start + len(whole.pending), last))
        for drafter, window in enumerate(whole.windows):
            if len(window):
                seen, last = columns(window)
                found.append((seen + start + whole.window_rows(drafter).start, last))
        for members, last in found:
            rows.append(members)
            ends.append(last + count)
            count += len(members)
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(rows), np.concatenate(ends)


def columns(window: WindowRows) -> tuple[Ints, Ints]:
    """Return the rows that each wanted row of a window needs, itself included, and where those of each end."""
    reach = window.sees | np.eye(len(window), dtype=bool)
    while True:
        further = (reach.astype(np.float32) @ reach.astype(np.float32)) > 0
        if (further == reach).all():
            break
        reach = further
    needed = reach[window.wanted]
    return np.nonzero(needed)[1], np.cumsum(needed.sum(1))


def part_of(whole: RequestPlan, rows: Ints, cached: int, reported: Ints) -> RequestPlan:
    """Return the rows of a request that one rank computes; it reports the results of some of them."""
    pending, nodes = len(whole.pending), len(whole.tree)
    own = whole.pending[cached - whole.num_cached :]
    predicted = pending - reported[reported < pending]
    part = RequestPlan(own, cached, whole.kv, whole.complete, int(predicted.max()) if len(predicted) else 0)
    if nodes:
        part.tree = part_of_tree(whole.tree, rows[(rows >= pending) & (rows < pending + nodes)] - pending)
    windows, start = [], pending + nodes
    for window in whole.windows:
        said = np.zeros(len(window), bool)
        said[reported[(reported >= start) & (reported < start + len(window))] - start] = True
        mine = rows[(rows >= start) & (rows < start + len(window))] - start
        sees = window.sees[np.ix_(mine, mine)]
        windows.append(WindowRows(window.tokens[mine], window.offsets[mine], sees, said[mine]))
        start += len(window)
    if any(map(len, windows)):
        part.windows = tuple(windows)
    return part


def part_of_tree(tree: DraftTree, nodes: Ints) -> DraftTree:
    """Return the tree of some nodes, ascending, and with the parent of each among them."""
    if len(nodes) == len(tree):
        return tree
    if not len(nodes):
        return NO_TREE
    places = np.full(len(tree) + 1, -1, np.int32)  # the last one: the parent of first tokens stays what it is
    places[nodes] = np.arange(len(nodes))
    columns = tree.columns[:, nodes]
    columns[1] = places[columns[1]]
    return DraftTree(columns, tree.scores[nodes], tree.names)


def longest_held(rows: Ints, accepted: Seq[int]) -> list[int]:
    """Return where the accepted rows lie among the rows of a rank, as far as it has computed them without a gap."""
    places = np.searchsorted(rows, accepted)
    found = []
    for row, place in zip(accepted, places.tolist(), strict=True):
        if place == len(rows) or rows[place] != row:
            break
        found.append(place)
    return found


@jit
def branches(parents, most):  # type: ignore[no-untyped-def]
    """Return the nodes of the path to each leaf, leaves in depth-first order, and where the path of each ends.

    All paths together have at most `most` nodes.
    """
    count = len(parents)
    first_child = np.full(count + 1, -1, np.int64)  # the last one: of the last token of the text
    next_sibling = np.full(count, -1, np.int64)
    for node in range(count - 1, -1, -1):
        parent = parents[node] if parents[node] >= 0 else count
        next_sibling[node] = first_child[parent]
        first_child[parent] = node
    rows, ends = np.empty(most, np.int64), np.empty(count, np.int64)
    filled = leaves = 0
    node = first_child[count]
    while node >= 0:
        if first_child[node] >= 0:
            node = first_child[node]
            continue
        up = node
        while up >= 0:
            rows[filled] = up
            filled += 1
            up = parents[up]
        ends[leaves] = filled
        leaves += 1
        while node >= 0 and next_sibling[node] < 0:
            node = parents[node]
        if node >= 0:
            node = next_sibling[node]
    return rows[:filled], ends[:leaves]


@jit
def share_units(rows, ends, fed, total):  # type: ignore[no-untyped-def]
    """Return the rank of each unit, ascending, such that the rank with the most rows has as few as possible.

    `fed` are the rows that each rank has anyway, [ranks]; `total` is the number of rows of the step.
    """
    found, seen = np.zeros(len(ends), np.int64), np.empty(total, np.int64)
    low, high = fed.max(), fed.max() + total
    while low < high:
        middle = (low + high) // 2
        if fill(rows, ends, fed, middle, found, seen):
            high = middle
        else:
            low = middle + 1
    fill(rows, ends, fed, high, found, seen)
    return found


@jit
def fill(rows, ends, fed, limit, found, seen):  # type: ignore[no-untyped-def]
    """Give units to one rank after the other, each up to `limit` rows; False if they do not fit.

    Writes the rank of each unit to `found`; `seen` is scratch memory, [all rows].
    """
    seen[:] = -1
    rank, load, first = 0, fed[0], 0
    for unit in range(len(ends)):
        while True:
            new = 0
            for i in range(first, ends[unit]):
                new += seen[rows[i]] != rank
            if load + new <= limit:
                break
            rank += 1
            if rank == len(fed):
                return False
            load = fed[rank]
        for i in range(first, ends[unit]):
            seen[rows[i]] = rank
        load += new
        found[unit] = rank
        first = ends[unit]
    return True


@jit
def hold(held, rows, ends, ranks):  # type: ignore[no-untyped-def]
    """Mark the rows of each unit as held by its rank."""
    first = 0
    for unit in range(len(ends)):
        for i in range(first, ends[unit]):
            held[ranks[unit], rows[i]] = True
        first = ends[unit]
