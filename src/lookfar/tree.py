"""What a step feeds to the model: the chain that ends in the root, the draft tree and the riders. NumPy only.

Rows of one sequence lie in this order: chain (known tokens whose keys and values are not cached yet; the last one
is the root), tree nodes (parents before children), riders.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ROOT = -1  # the parent of a tree's first nodes


class TokenTree:
    """Guesses for what follows the root, with shared prefixes stored once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []  # 1 for a child of the root
        self.sources: list[str] = []  # who proposed the node first
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of `ROOT`) that holds `token`."""
        return self._children.get((node, token))

    def insert(self, path: Seq[int], source: str, max_nodes: int, max_depth: int) -> None:
        """Add a path of tokens from the root, sharing what is there, as far as the limits allow."""
        node = ROOT
        for depth, token in enumerate(path[:max_depth], start=1):
            found = self._children.get((node, token))
            if found is None:
                if len(self.tokens) >= max_nodes:
                    return
                found = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(depth)
                self.sources.append(source)
                self._children[node, token] = found
            node = found

    def ancestors(self) -> Bools:
        """[nodes, nodes]: does row i's path from the root pass through node j (itself included)?"""
        seen = np.eye(len(self), dtype=bool)
        parents, depths = np.array(self.parents, dtype=np.int64), np.array(self.depths, dtype=np.int64)
        for depth in range(2, int(depths.max(initial=0)) + 1):
            nodes = np.flatnonzero(depths == depth)
            seen[nodes] |= seen[parents[nodes]]
        return seen


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


@dataclass(frozen=True)
class SequencePlan:
    """The rows of one sequence in one step."""

    chain: Ints  # [c] tokens at positions cached … cached + c − 1
    cached: int  # how many tokens of the sequence have their keys and values cached
    complete: bool = True  # False: a piece of a long prompt, nothing is chosen after it
    tree: TokenTree = field(default_factory=TokenTree)
    riders: tuple[Riders, ...] = ()  # one entry for each drafter, perhaps without rows

    def __len__(self) -> int:
        return len(self.chain) + len(self.tree) + sum(map(len, self.riders))

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
        parts = [self.chain, np.array(self.tree.tokens, dtype=np.int64), *(r.tokens for r in self.riders)]
        return np.concatenate(parts)

    @cached_property
    def positions(self) -> Ints:
        root = self.cached + self.root_row
        depths = np.array(self.tree.depths, dtype=np.int64)
        chain = np.arange(self.cached, root + 1)
        return np.concatenate([chain, root + depths, *(root + r.offsets for r in self.riders)])

    @cached_property
    def visible(self) -> Bools:
        """[rows, rows]: which rows of this step each row sees. All rows see all cached tokens as well."""
        c, rows = len(self.chain), len(self)
        visible = np.zeros((rows, rows), dtype=bool)
        visible[:, :c] = True
        visible[:c, :c] = np.tri(c, dtype=bool)
        start = c
        for block in (self.tree.ancestors(), *(r.sees for r in self.riders)):
            end = start + len(block)
            visible[start:end, start:end] = block
            start = end
        return visible

    @cached_property
    def wanted(self) -> Bools:
        """[rows]: rows whose logits are needed."""
        if not self.complete:
            return np.zeros(len(self), dtype=bool)
        chain = np.arange(len(self.chain)) == self.root_row
        return np.concatenate([chain, np.ones(len(self.tree), bool), *(r.wanted for r in self.riders)])


class Plan:
    """One forward for several sequences in neighbouring slots: every row, padded to the longest sequence.

    Padding rows hold token 0 at the root's position, see what the root sees, and are never read.
    """

    def __init__(self, sequences: Seq[SequencePlan], first_slot: int = 0, kept: Ints | None = None) -> None:
        self.sequences = sequences
        self.first_slot = first_slot
        self.cached = np.array([s.cached for s in sequences], dtype=np.int64)  # [batch]
        self.rows = np.array([len(s) for s in sequences], dtype=np.int64)  # [batch]
        self.width = int(self.rows.max())
        batch = len(sequences)
        self.tokens = np.zeros((batch, self.width), dtype=np.int64)
        self.positions = np.zeros((batch, self.width), dtype=np.int64)
        self.visible = np.zeros((batch, self.width, self.width), dtype=bool)
        wanted = np.zeros(self.width, dtype=bool)
        for i, sequence in enumerate(sequences):
            n = len(sequence)
            self.tokens[i, :n] = sequence.tokens
            self.positions[i, :n] = sequence.positions
            self.positions[i, n:] = sequence.cached + sequence.root_row
            self.visible[i, :n, :n] = sequence.visible
            self.visible[i, n:] = self.visible[i, sequence.root_row]
            wanted[:n] |= sequence.wanted
        # Logits are made for the union over the batch: a model takes one list of rows for all sequences.
        self.kept = np.flatnonzero(wanted) if kept is None else kept

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
