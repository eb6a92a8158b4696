"""A trie of branches with counts, in flat arrays: which tokens followed which, and how often.

The children of a node form a list that keeps itself roughly sorted: a counted child moves in front of the neighbours
that count no more, past at most `FANOUT` of them. Look-ups read the first `FANOUT` entries of a list, so their time
does not depend on how much is stored. When the nodes run out, all counts are halved and nodes that fall to zero are
dropped, which also serves as decay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.heap import pop, push
from lookfar.core.jit import jit

FANOUT = 24
MAX_COUNT = 1 << 30  # counts stay below this, so that adding two never overflows
NONE = -1
# Columns of the node table. FIRST is a node's first child; NEXT and PREVIOUS link the children of one parent.
TOKEN, COUNT, FIRST, NEXT, PREVIOUS, PARENT = range(6)


class TrieArrays(NamedTuple):
    """The arrays of a trie, as compiled code takes them."""

    nodes: Int32s  # [room, 6] the node table; node 0 stands before every branch
    table: Int32s  # a hash table from (parent, token) to the node


class CountedNodes(NamedTuple):
    """All nodes but node 0, parents before children: the form in which a file holds a trie."""

    tokens: Int32s
    parents: Int32s
    counts: Int32s


class WeightedNode(NamedTuple):
    """A node below which to look for branches, and the weight of its trie's counts."""

    nodes: Int32s
    start: int  # -1: none
    weight: np.float32


class CountedTrie:
    """Branches of up to `depth` tokens in at most `max_nodes` nodes."""

    def __init__(self, depth: int, max_nodes: int) -> None:
        self.depth = depth
        self.max_nodes = max_nodes
        self.size = 1
        root = np.full((1, 6), NONE, dtype=np.int32)
        root[0, COUNT] = 0
        self._allocate(min(max_nodes, 1 << 12), root)

    def _allocate(self, room: int, nodes: Int32s) -> None:
        """Make arrays for `room` nodes that start with `nodes`."""
        table = np.full(1 << (2 * room).bit_length(), NONE, dtype=np.int32)
        self.arrays = TrieArrays(np.full((room, 6), NONE, dtype=np.int32), table)
        self.arrays.nodes[: len(nodes)] = nodes
        self.size = len(nodes)
        rehash(self.arrays, self.size)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def insert(self, ids: npt.ArrayLike, until: int | None = None) -> None:
        """Count the branches of a text: the one that starts at each place, or at each place before `until`."""
        text = np.asarray(ids, dtype=np.int32)
        first, until = 0, len(text) if until is None else until
        while first < until:
            first, self.size = insert_branches(self.arrays, self.size, text, first, until, self.depth)
            if first < until:
                self._make_room()

    def _make_room(self) -> None:
        nodes = self.arrays.nodes[: self.size]
        if len(self.arrays.nodes) < self.max_nodes:
            self._allocate(min(self.max_nodes, 2 * len(self.arrays.nodes)), nodes)
            return
        while len(nodes) > self.max_nodes // 2:
            nodes = halve(nodes)
        self._allocate(self.max_nodes, nodes)

    def find(self, suffix: Int32s) -> int:
        """Return the node reached over `suffix`, or -1."""
        return int(descend(self.arrays, suffix))

    def counted(self) -> CountedNodes:
        """Return a copy of all nodes but node 0."""
        live = self.arrays.nodes[1 : self.size]
        return CountedNodes(live[:, TOKEN].copy(), live[:, PARENT].copy(), live[:, COUNT].copy())

    def merge(self, other: CountedNodes) -> None:
        """Add the counts of another trie."""
        place = np.zeros(len(other.tokens) + 1, np.int32)
        done = 0
        while done < len(other.tokens):
            done, self.size = merge_nodes(self.arrays, self.size, other, place, done, self.depth)
            if done < len(other.tokens):
                self._make_room()
                relocate(self.arrays, other, place, done)  # pruning renumbers the nodes

    def best_branches(
        self, suffix: Int32s, weight: float, other: CountedTrie, other_weight: float, limits: tuple[int, int]
    ) -> tuple[Int32s, Int32s, Int32s, Floats]:
        """Return the nodes after `suffix` in this trie and in another one with the highest weighted counts.

        `limits` are the most nodes and the deepest. Returns tokens, parents (-1: none), depths and weights.
        """
        found: tuple[Int32s, Int32s, Int32s, Floats] = best_branches(
            WeightedNode(self.arrays.nodes, self.find(suffix) if weight else NONE, np.float32(weight)),
            WeightedNode(other.arrays.nodes, other.find(suffix) if other_weight else NONE, np.float32(other_weight)),
            *limits,
        )
        return found


@jit
def slot_of(arrays, parent, token):  # type: ignore[no-untyped-def]
    """Return the slot of the hash table that holds this child, or the free slot for it."""
    nodes, table = arrays
    mask = len(table) - 1
    mixed = (np.uint64(parent) << np.uint64(32) | np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64((mixed >> np.uint64(20)) & np.uint64(mask))
    while table[slot] >= 0 and (nodes[table[slot], PARENT] != parent or nodes[table[slot], TOKEN] != token):
        slot = (slot + 1) & mask
    return slot


@jit
def rehash(arrays, size):  # type: ignore[no-untyped-def]
    nodes, table = arrays
    for node in range(1, size):
        table[slot_of(arrays, nodes[node, PARENT], nodes[node, TOKEN])] = node


@jit
def descend(arrays, suffix):  # type: ignore[no-untyped-def]
    node = 0
    for token in suffix:
        node = arrays.table[slot_of(arrays, node, token)]
        if node < 0:
            return NONE
    return node


@jit
def climb(nodes, node):  # type: ignore[no-untyped-def]
    """Move a node in front of the neighbours that count no more than it does, past at most `FANOUT` of them."""
    ahead, steps = nodes[node, PREVIOUS], 0
    while ahead != NONE and nodes[ahead, COUNT] <= nodes[node, COUNT] and steps < FANOUT:
        ahead, steps = nodes[ahead, PREVIOUS], steps + 1
    if not steps:
        return
    before, behind = nodes[node, PREVIOUS], nodes[node, NEXT]
    nodes[before, NEXT] = behind
    if behind != NONE:
        nodes[behind, PREVIOUS] = before
    first = nodes[nodes[node, PARENT], FIRST] if ahead == NONE else nodes[ahead, NEXT]
    nodes[node, PREVIOUS], nodes[node, NEXT], nodes[first, PREVIOUS] = ahead, first, node
    if ahead == NONE:
        nodes[nodes[node, PARENT], FIRST] = node
    else:
        nodes[ahead, NEXT] = node


@jit
def add_node(nodes, size, parent, token):  # type: ignore[no-untyped-def]
    """Add a child as the second of its parent's list: recent ones are found, and the most frequent one stays first."""
    node = size
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, COUNT] = token, parent, 0
    nodes[node, FIRST] = NONE
    front = nodes[parent, FIRST]
    nodes[node, PREVIOUS] = front
    if front == NONE:
        nodes[parent, FIRST], nodes[node, NEXT] = node, NONE
    else:
        behind = nodes[front, NEXT]
        nodes[node, NEXT], nodes[front, NEXT] = behind, node
        if behind != NONE:
            nodes[behind, PREVIOUS] = node
    return size + 1


@jit
def count_child(arrays, size, parent, token, amount):  # type: ignore[no-untyped-def]
    nodes, table = arrays
    slot = slot_of(arrays, parent, token)
    node = table[slot]
    if node < 0:
        node = size
        size = add_node(nodes, size, parent, token)
        table[slot] = node
    nodes[node, COUNT] = min(nodes[node, COUNT] + amount, MAX_COUNT)
    climb(nodes, node)
    return node, size


@jit
def insert_branches(arrays, size, text, first, until, depth):  # type: ignore[no-untyped-def]
    """Insert branches from place `first` on while a whole branch fits. Returns the place reached, and the size."""
    while first < until:
        if size + depth > len(arrays.nodes):
            break
        node = 0
        for i in range(first, min(first + depth, len(text))):
            if text[i] < 0:
                break
            node, size = count_child(arrays, size, node, text[i], 1)
        first += 1
    return first, size


@jit
def merge_nodes(arrays, size, other, place, done, depth):  # type: ignore[no-untyped-def]
    """Merge nodes of `other` from `done` on while they fit; `place[i + 1]` becomes the node of its node i."""
    while done < len(other.tokens):
        if size + depth > len(arrays.nodes):
            break
        parent = place[other.parents[done]]
        if parent >= 0:
            place[done + 1], size = count_child(arrays, size, parent, other.tokens[done], other.counts[done])
        else:
            place[done + 1] = NONE
        done += 1
    return done, size


@jit
def relocate(arrays, other, place, done):  # type: ignore[no-untyped-def]
    for i in range(done):
        parent = place[other.parents[i]]
        place[i + 1] = arrays.table[slot_of(arrays, parent, other.tokens[i])] if parent >= 0 else NONE


@jit
def halve(nodes):  # type: ignore[no-untyped-def]
    """Halve all counts and drop nodes that fall to zero; the others keep their order, without gaps."""
    size = len(nodes)
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
        for pointer, along in ((FIRST, NEXT), (NEXT, NEXT), (PREVIOUS, PREVIOUS)):
            other = nodes[node, pointer]
            while other != NONE and place[other] < 0:
                other = nodes[other, along]
            new[pointer] = place[other] if other != NONE else NONE
    return smaller


@jit
def best_branches(one, two, most, deepest):  # type: ignore[no-untyped-def]
    """Return the `most` nodes below two weighted nodes with the highest weighted counts, parents before children.

    Returns tokens, parents (-1 for the starting nodes), depths and weights.
    """
    room = 1 + most * 2 * FANOUT + 2 * FANOUT
    in_one = np.full(room, NONE, np.int32)
    in_two = np.full(room, NONE, np.int32)
    tokens = np.empty(room, np.int32)
    parents = np.empty(room, np.int32)
    depths = np.zeros(room, np.int32)
    weights = np.zeros(room, np.float32)
    number = np.full(room, NONE, np.int32)  # its place among the chosen nodes
    chosen = np.empty(most, np.int32)
    heap = np.empty(room, np.int32)
    in_one[0], in_two[0] = one.start, two.start
    used, count, place, heap_size = 1, 0, 0, 0
    while True:
        if depths[place] < deepest:
            first = used
            used = read_children(one, in_one, place, (tokens, weights), first, used)
            used = read_children(two, in_two, place, (tokens, weights), first, used)
            for i in range(first, used):
                parents[i], depths[i] = place, depths[place] + 1
                heap_size = push(heap, heap_size, weights, i)
        if count == most or not heap_size:
            break
        place, heap_size = pop(heap, heap_size, weights)
        number[place] = count
        chosen[count] = place
        count += 1
    out_parents = np.empty(count, np.int32)
    for i in range(count):
        parent = parents[chosen[i]]
        out_parents[i] = number[parent] if parent else NONE
    chosen = chosen[:count]
    return tokens[chosen], out_parents, depths[chosen], weights[chosen]


@jit
def read_children(trie, members, place, entries, first, used):  # type: ignore[no-untyped-def]
    """Add the children of `members[place]` to the entries `first … used`, or their counts to equal tokens there."""
    tokens, weights = entries
    node, scanned, known = trie.nodes[members[place], FIRST] if members[place] >= 0 else NONE, 0, used
    while node != NONE and scanned < FANOUT:
        at = first
        while at < known and tokens[at] != trie.nodes[node, TOKEN]:
            at += 1
        if at == known:
            at, used = used, used + 1
            tokens[at], weights[at] = trie.nodes[node, TOKEN], 0
        members[at] = node
        weights[at] += trie.weight * trie.nodes[node, COUNT]
        scanned, node = scanned + 1, trie.nodes[node, NEXT]
    return used
