"""A trie of branches with counts, in flat arrays: what followed what, and how often.

Children of a node form a list that keeps itself roughly in order: a child that is counted moves in front of those that
count no more, past at most `FANOUT` of them. Look-ups read the first `FANOUT` of a list and so take the same time
however much is stored. When the nodes run out, counts are halved and what falls to nothing is dropped, which is also
the decay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lookfar.arrays import Int32s
from lookfar.heap import pop, push
from lookfar.jit import jit

FANOUT = 24
MOST = 1 << 30  # counts stay below this, so that adding two never overflows
NONE = -1
# Columns of the node table.
TOKEN, COUNT, FIRST, NEXT, BEFORE, PARENT = range(6)


class CountedTrie:
    """Branches of up to `depth` tokens in at most `max_nodes` nodes; node 0 stands before every branch."""

    def __init__(self, depth: int, max_nodes: int) -> None:
        self.depth = depth
        self.max_nodes = max_nodes
        self.size = 1
        self._allocate(min(max_nodes, 1 << 12))

    def _allocate(self, room: int) -> None:
        nodes = np.full((room, 6), NONE, dtype=np.int32)
        nodes[0, COUNT] = 0
        if hasattr(self, "nodes"):
            nodes[: self.size] = self.nodes[: self.size]
        self.nodes: Int32s = nodes
        self.table: Int32s = np.full(1 << (2 * room).bit_length(), NONE, dtype=np.int32)  # hash → node
        rehash(self.nodes, self.size, self.table)

    @property
    def nbytes(self) -> int:
        return self.nodes.nbytes + self.table.nbytes

    def insert(self, ids: npt.ArrayLike, until: int | None = None) -> None:
        """Count the branches of a text: each place of it, or each before `until`, and what follows."""
        text = np.asarray(ids, dtype=np.int32)
        first, until = 0, len(text) if until is None else until
        while first < until:
            first, self.size = insert_branches(self.nodes, self.size, self.table, text, first, until, self.depth)
            if first < until:
                self._make_room()

    def _make_room(self) -> None:
        if len(self.nodes) < self.max_nodes:
            self._allocate(min(self.max_nodes, 2 * len(self.nodes)))
            return
        while self.size > self.max_nodes // 2:
            self.nodes = halve(self.nodes, self.size)
            self.size = len(self.nodes)
        self._allocate(self.max_nodes)

    def find(self, suffix: Int32s) -> int:
        """The node reached over `suffix`, or -1."""
        return int(descend(self.nodes, self.table, suffix))

    def counted(self) -> tuple[Int32s, Int32s, Int32s]:
        """Tokens, parents and counts of all nodes but the first, parents before children: what a file holds."""
        live = self.nodes[1 : self.size]
        return live[:, TOKEN].copy(), live[:, PARENT].copy(), live[:, COUNT].copy()

    def merge(self, tokens: Int32s, parents: Int32s, counts: Int32s) -> None:
        """Add the counts of another trie, given as `counted` gives them."""
        place = np.zeros(len(tokens) + 1, np.int32)
        done = 0
        while done < len(tokens):
            done, self.size = merge_nodes(
                self.nodes, self.size, self.table, tokens, parents, counts, place, done, self.depth
            )
            if done < len(tokens):
                self._make_room()
                # Pruning renumbers the nodes, so find the places anew.
                relocate(self.nodes, self.table, tokens, parents, place, done)


@jit
def slot_of(table, nodes, parent, token):  # type: ignore[no-untyped-def]
    """Where the table holds this child, or the free slot for it."""
    mask = len(table) - 1
    mixed = (np.uint64(parent) << np.uint64(32) | np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64((mixed >> np.uint64(20)) & np.uint64(mask))
    while table[slot] >= 0 and (nodes[table[slot], PARENT] != parent or nodes[table[slot], TOKEN] != token):
        slot = (slot + 1) & mask
    return slot


@jit
def rehash(nodes, size, table):  # type: ignore[no-untyped-def]
    for node in range(1, size):
        table[slot_of(table, nodes, nodes[node, PARENT], nodes[node, TOKEN])] = node


@jit
def descend(nodes, table, suffix):  # type: ignore[no-untyped-def]
    node = 0
    for token in suffix:
        node = table[slot_of(table, nodes, node, token)]
        if node < 0:
            return NONE
    return node


@jit
def climb(nodes, node):  # type: ignore[no-untyped-def]
    """Move a node in front of the neighbours that count no more than it does, past at most `FANOUT` of them."""
    ahead, steps = nodes[node, BEFORE], 0
    while ahead != NONE and nodes[ahead, COUNT] <= nodes[node, COUNT] and steps < FANOUT:
        ahead, steps = nodes[ahead, BEFORE], steps + 1
    if not steps:
        return
    before, behind = nodes[node, BEFORE], nodes[node, NEXT]
    nodes[before, NEXT] = behind
    if behind != NONE:
        nodes[behind, BEFORE] = before
    first = nodes[nodes[node, PARENT], FIRST] if ahead == NONE else nodes[ahead, NEXT]
    nodes[node, BEFORE], nodes[node, NEXT], nodes[first, BEFORE] = ahead, first, node
    if ahead == NONE:
        nodes[nodes[node, PARENT], FIRST] = node
    else:
        nodes[ahead, NEXT] = node


@jit
def add_node(nodes, size, parent, token):  # type: ignore[no-untyped-def]
    """A new child, second in its parent's list: recent ones are found, and the most frequent one stays in front."""
    node = size
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, COUNT] = token, parent, 0
    nodes[node, FIRST] = NONE
    front = nodes[parent, FIRST]
    nodes[node, BEFORE] = front
    if front == NONE:
        nodes[parent, FIRST], nodes[node, NEXT] = node, NONE
    else:
        behind = nodes[front, NEXT]
        nodes[node, NEXT], nodes[front, NEXT] = behind, node
        if behind != NONE:
            nodes[behind, BEFORE] = node
    return size + 1


@jit
def count_child(nodes, size, table, parent, token, amount):  # type: ignore[no-untyped-def]
    slot = slot_of(table, nodes, parent, token)
    node = table[slot]
    if node < 0:
        node = size
        size = add_node(nodes, size, parent, token)
        table[slot] = node
    nodes[node, COUNT] = min(nodes[node, COUNT] + amount, MOST)
    climb(nodes, node)
    return node, size


@jit
def insert_branches(nodes, size, table, text, first, until, depth):  # type: ignore[no-untyped-def]
    """Insert from place `first` on for as long as a whole branch fits. Returns the place reached, and the size."""
    while first < until:
        if size + depth > len(nodes):
            break
        node = 0
        for i in range(first, min(first + depth, len(text))):
            if text[i] < 0:
                break
            node, size = count_child(nodes, size, table, node, text[i], 1)
        first += 1
    return first, size


@jit
def merge_nodes(nodes, size, table, tokens, parents, counts, place, done, depth):  # type: ignore[no-untyped-def]
    while done < len(tokens):
        if size + depth > len(nodes):
            break
        parent = place[parents[done]]
        if parent >= 0:
            place[done + 1], size = count_child(nodes, size, table, parent, tokens[done], counts[done])
        else:
            place[done + 1] = NONE
        done += 1
    return done, size


@jit
def relocate(nodes, table, tokens, parents, place, done):  # type: ignore[no-untyped-def]
    for i in range(done):
        parent = place[parents[i]]
        place[i + 1] = table[slot_of(table, nodes, parent, tokens[i])] if parent >= 0 else NONE


@jit
def halve(nodes, size):  # type: ignore[no-untyped-def]
    """All counts halved, what falls to nothing dropped, the rest without gaps and with lists in their old order."""
    place = np.full(size, NONE, np.int32)
    place[0] = 0
    kept = 1
    for node in range(1, size):  # a parent comes before its children, and counts at least as much as they do
        if nodes[node, COUNT] > 1:
            place[node] = kept
            kept += 1
    smaller = np.empty((kept, nodes.shape[1]), np.int32)
    for node in range(size):
        if place[node] < 0:
            continue
        new = smaller[place[node]]
        new[TOKEN], new[COUNT] = nodes[node, TOKEN], nodes[node, COUNT] // 2
        new[PARENT] = place[nodes[node, PARENT]] if node else NONE
        for pointer, along in ((FIRST, NEXT), (NEXT, NEXT), (BEFORE, BEFORE)):
            other = nodes[node, pointer]
            while other != NONE and place[other] < 0:
                other = nodes[other, along]
            new[pointer] = place[other] if other != NONE else NONE
    return smaller


@jit
def best_branches(nodes, table, start, weight, other_nodes, other_table, other_start, other_weight, most, deepest):  # type: ignore[no-untyped-def]
    """The `most` nodes below two places (of two tries; -1 for none) with the highest weighted counts.

    Returns tokens, parents (-1 for the places themselves), depths and weights, parents before children.
    """
    room = 1 + most * 2 * FANOUT + 2 * FANOUT
    mine = np.full(room, NONE, np.int32)
    others = np.full(room, NONE, np.int32)
    tokens = np.empty(room, np.int32)
    parents = np.empty(room, np.int32)
    depths = np.zeros(room, np.int32)
    weights = np.zeros(room, np.float32)
    taken = np.full(room, NONE, np.int32)  # its number among the chosen
    chosen = np.empty(most, np.int32)
    heap = np.empty(room, np.int32)
    mine[0], others[0] = start, other_start
    used, count, place, heap_size = 1, 0, 0, 0
    while True:
        if depths[place] < deepest:
            first = used
            node, scanned = (nodes[mine[place], FIRST] if mine[place] >= 0 else NONE), 0
            while node != NONE and scanned < FANOUT:
                tokens[used], mine[used], weights[used] = nodes[node, TOKEN], node, weight * nodes[node, COUNT]
                used, scanned, node = used + 1, scanned + 1, nodes[node, NEXT]
            joined = used
            node, scanned = (other_nodes[others[place], FIRST] if others[place] >= 0 else NONE), 0
            while node != NONE and scanned < FANOUT:
                at = first
                while at < joined and tokens[at] != other_nodes[node, TOKEN]:
                    at += 1
                if at == joined:
                    at, used = used, used + 1
                    tokens[at], weights[at] = other_nodes[node, TOKEN], 0
                others[at] = node
                weights[at] += other_weight * other_nodes[node, COUNT]
                scanned, node = scanned + 1, other_nodes[node, NEXT]
            for i in range(first, used):
                parents[i], depths[i] = place, depths[place] + 1
                heap_size = push(heap, heap_size, weights, i)
        if count == most or not heap_size:
            break
        place, heap_size = pop(heap, heap_size, weights)
        taken[place] = count
        chosen[count] = place
        count += 1
    out_parents = np.empty(count, np.int32)
    for i in range(count):
        parent = parents[chosen[i]]
        out_parents[i] = taken[parent] if parent else NONE
    chosen = chosen[:count]
    return tokens[chosen], out_parents, depths[chosen], weights[chosen]
