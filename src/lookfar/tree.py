"""What a step feeds to the model: the chain that ends in the root, the draft tree and the riders. NumPy only.

Rows of one sequence lie in this order: chain (known tokens whose keys and values are not cached yet; the last one
is the root), tree nodes (parents before children), riders.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lookfar.arrays import Bools, Floats, Int32s, Ints
from lookfar.jit import jit

if TYPE_CHECKING:
    from lookfar.planner import Guesses


ROOT = -1  # the parent of a tree's first nodes


@dataclass(eq=False)
class TokenTree:
    """Guesses for what follows the root, with shared prefixes stored once. Parents come before their children."""

    tokens: Int32s
    parents: Int32s  # `ROOT` for a child of the root
    depths: Int32s  # 1 for a child of the root
    sources: Int32s  # who proposed the node with most conviction, by its place in `names`
    scores: Floats  # the estimated probability that the node is accepted
    backers: Int32s  # how many sources proposed it
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Seq[Seq[int]], source: str = "") -> TokenTree:
        """The tree of some paths from the root, for those who have no planner."""
        places: dict[tuple[int, ...], int] = {}
        for path in paths:
            for depth in range(1, len(path) + 1):
                places.setdefault(tuple(path[:depth]), len(places))
        columns = [[p[-1], places.get(p[:-1], ROOT), len(p), 0] for p in places]
        tokens, parents, depths, sources = np.array(columns, dtype=np.int32).reshape(-1, 4).T
        return cls(
            tokens,
            parents,
            depths,
            sources,
            np.ones(len(places), np.float32),
            np.ones(len(places), np.int32),
            (source,),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of `ROOT`) that holds `token`."""
        found: int = find_child(self.parents, self.tokens, node, token) if len(self.tokens) else -1
        return found if found >= 0 else None

    def source(self, node: int) -> str:
        return self.names[int(self.sources[node])]


@jit
def find_child(parents, tokens, node, token):  # type: ignore[no-untyped-def]
    for i in range(max(node, 0), len(parents)):
        if parents[i] == node and tokens[i] == token:
            return i
    return -1


NO_TREE = TokenTree(*(np.zeros(0, np.int32),) * 4, np.zeros(0, np.float32), np.zeros(0, np.int32))


@jit
def visibility(chain, parents, riders):  # type: ignore[no-untyped-def]
    """[rows, rows]: the chain sees backwards, every other row the chain, and every node the path to it.

    What the `riders` rows at the end see of each other is for their drafters to say.
    """
    nodes = len(parents)
    rows = chain + nodes + riders
    visible = np.zeros((rows, rows), np.bool_)
    for row in range(chain):
        visible[row, : row + 1] = True
    for row in range(chain, rows):
        visible[row, :chain] = True
    for node in range(nodes):
        row, parent = chain + node, parents[node]
        if parent >= 0:
            visible[row, chain : chain + parent + 1] = visible[chain + parent, chain : chain + parent + 1]
        visible[row, row] = True
    return visible


@jit
def after_what(chain, tokens, parents, before):  # type: ignore[no-untyped-def]
    """The tokens of a chain and its tree, and the token before each; `before` stands before the first."""
    fed = np.empty(len(chain) + len(tokens), np.int32)
    behind = np.empty(len(fed), np.int32)
    for row in range(len(chain)):
        fed[row] = chain[row]
        behind[row] = chain[row - 1] if row else before
    for node in range(len(tokens)):
        fed[len(chain) + node] = tokens[node]
        behind[len(chain) + node] = fed[len(chain) + parents[node]]
    return fed, behind


@dataclass(frozen=True)
class Riders:
    """Rows that are not guesses to verify but make guesses for later. Every rider sees the chain."""

    tokens: Ints  # [k]
    offsets: Ints  # [k] positions relative to the root's
    sees: Bools  # [k, k] which riders each one sees, itself included
    wanted: Bools  # [k] riders whose choice the drafter wants back

    def __len__(self) -> int:
        return len(self.tokens)


NO_RIDERS = Riders(*(np.zeros(0, np.int64),) * 2, np.zeros((0, 0), bool), np.zeros(0, bool))


@dataclass(eq=False)
class SequencePlan:
    """The rows of one sequence in one step."""

    chain: Ints  # [c] tokens at positions cached … cached + c − 1
    cached: int  # how many tokens of the sequence have their keys and values cached
    complete: bool = True  # False: a piece of a long prompt, nothing is chosen after it
    learned: int = 0  # how many of the chain's last rows drafters want the predictions of
    tree: TokenTree = NO_TREE
    riders: tuple[Riders, ...] = ()  # one entry for each drafter, perhaps without rows; or none at all

    def __len__(self) -> int:
        riding = sum(map(len, self.riders)) if self.riders else 0
        return len(self.chain) + len(self.tree.tokens) + riding

    @property
    def root_row(self) -> int:
        return len(self.chain) - 1

    def node_row(self, node: int) -> int:
        """The row of a tree node; the root's row for `ROOT`."""
        return len(self.chain) + node

    def rider_rows(self, drafter: int) -> slice:
        """The rows of one drafter's riders."""
        start = len(self.chain) + len(self.tree) + sum(map(len, self.riders[:drafter]))
        return slice(start, start + len(self.riders[drafter]))

    @cached_property
    def tokens(self) -> Ints:
        return np.concatenate([self.chain, self.tree.tokens, *(r.tokens for r in self.riders)])

    @cached_property
    def positions(self) -> Ints:
        root = self.cached + self.root_row
        chain = np.arange(self.cached, root + 1)
        return np.concatenate([chain, root + self.tree.depths, *(root + r.offsets for r in self.riders)])

    @cached_property
    def visible(self) -> Bools:
        """[rows, rows]: which rows of this step each row sees. All rows see all cached tokens as well."""
        riding = sum(map(len, self.riders))
        visible: Bools = visibility(len(self.chain), self.tree.parents, riding)
        start = len(self) - riding
        for riders in self.riders:
            end = start + len(riders)
            visible[start:end, start:end] = riders.sees
            start = end
        return visible

    @cached_property
    def wanted(self) -> Bools:
        """[rows]: rows whose logits are needed."""
        rows = max(self.learned, int(self.complete))
        chain = np.arange(len(self.chain)) >= len(self.chain) - rows
        return np.concatenate([chain, np.ones(len(self.tree), bool), *(r.wanted for r in self.riders)])


class Plan:
    """One forward for several sequences in neighbouring slots.

    Its arrays hold every row, padded to the longest sequence. Padding rows hold token 0 at the root's position, see
    what the root sees, and are never read.
    """

    def __init__(
        self,
        sequences: Seq[SequencePlan],
        first_slot: int = 0,
        kept: Ints | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        self.sequences = sequences
        self.guesses = guesses  # what the trees were chosen from
        self.first_slot = first_slot
        self.lengths = [len(s) for s in sequences]
        self.width = max(self.lengths)
        if kept is not None:
            self.kept = kept

    @cached_property
    def cached(self) -> Ints:
        return np.array([s.cached for s in self.sequences], dtype=np.int64)  # [batch]

    @cached_property
    def rows(self) -> Ints:
        return np.array(self.lengths, dtype=np.int64)  # [batch]

    @cached_property
    def tokens(self) -> Ints:
        """[batch, rows]"""
        tokens = np.zeros((self.batch, self.width), dtype=np.int64)
        for i, sequence in enumerate(self.sequences):
            tokens[i, : len(sequence)] = sequence.tokens
        return tokens

    @cached_property
    def positions(self) -> Ints:
        """[batch, rows]"""
        positions = np.zeros((self.batch, self.width), dtype=np.int64)
        for i, sequence in enumerate(self.sequences):
            positions[i, : len(sequence)] = sequence.positions
            positions[i, len(sequence) :] = sequence.cached + sequence.root_row
        return positions

    @cached_property
    def kept(self) -> Ints:
        """Rows whose logits are made: the union over the batch, since a model takes one list for all sequences."""
        wanted = np.zeros(self.width, dtype=bool)
        for sequence in self.sequences:
            wanted[: len(sequence)] |= sequence.wanted
        return np.flatnonzero(wanted)

    @cached_property
    def visible(self) -> Bools:
        """[batch, rows, rows]: made when a mask is, so not for straight steps."""
        visible = np.zeros((self.batch, self.width, self.width), dtype=bool)
        for i, sequence in enumerate(self.sequences):
            n = len(sequence)
            visible[i, :n, :n] = sequence.visible
            visible[i, n:] = visible[i, sequence.root_row]
        return visible

    @property
    def batch(self) -> int:
        return len(self.sequences)

    @property
    def straight(self) -> bool:
        """Is this what any model expects: the next tokens of texts of one length, and nothing else?"""
        only_chains = all(len(s) == len(s.chain) for s in self.sequences)
        return only_chains and bool((self.cached == self.cached[0]).all() and (self.rows == self.rows[0]).all())

    @property
    def kv_length(self) -> int:
        """How many keys a row may look at: the longest cached text and this step's rows."""
        return int(self.cached.max()) + self.width

    def by_row(self, kept_values: Ints) -> Ints:
        """Values of the kept rows, [batch, kept], put where the rows are, [batch, rows]; -1 elsewhere."""
        spread = np.full((self.batch, self.width), -1, dtype=np.int64)
        spread[:, self.kept] = kept_values
        return spread
