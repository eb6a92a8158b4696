"""Draft trees: proposed continuations of a text, with shared prefixes stored once. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit

TOKEN, PARENT, DEPTH = range(3)  # columns of a tree that compiled code reads
ROOT = -1  # the parent of a tree's first nodes: the last token of the text


@dataclass(eq=False, slots=True)
class DraftTree:
    """Draft tokens after the last token of a text. Parents come before their children."""

    columns: Int32s  # [5, nodes] the properties below
    scores: Floats  # the estimated probability that a node is accepted
    names: tuple[str, ...] = ()  # of sources

    @classmethod
    def from_paths(cls, paths: Seq[Seq[int]], source: str = "") -> DraftTree:
        """Build the tree of some continuations, each with score 1."""
        places: dict[tuple[int, ...], int] = {}
        for path in paths:
            for depth in range(1, len(path) + 1):
                places.setdefault(tuple(path[:depth]), len(places))
        rows = [[p[-1], places.get(p[:-1], ROOT), len(p), 0, 1] for p in places]
        columns = np.array(rows, dtype=np.int32).reshape(-1, 5).T.copy()
        return cls(columns, np.ones(len(places), np.float32), (source,))

    @property
    def tokens(self) -> Int32s:
        return self._column(0)

    @property
    def parents(self) -> Int32s:
        """The parent of each node, `ROOT` for a first token."""
        return self._column(1)

    @property
    def depths(self) -> Int32s:
        """1 for a first token."""
        return self._column(2)

    @property
    def top_sources(self) -> Int32s:
        """The source with the strongest evidence for a node, as an index into `names`."""
        return self._column(3)

    @property
    def num_sources(self) -> Int32s:
        """How many sources proposed a node."""
        return self._column(4)

    def _column(self, column: int) -> Int32s:
        found: Int32s = self.columns[column]
        return found

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` (or of `ROOT`) that holds `token`."""
        found: int = find_child(self.parents, self.tokens, node, token) if len(self) else -1
        return found if found >= 0 else None

    def source(self, node: int) -> str:
        """Return the name of a node's top source."""
        return self.names[int(self.top_sources[node])]

    def path_of(self, tokens: Seq[int]) -> list[int]:
        """Return the nodes that `tokens` lead through, as far as the tree holds them."""
        path, node = [], ROOT
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path


@dataclass(eq=False, slots=True)
class DraftTrees:
    """The draft trees of all requests of a step, one behind the other."""

    columns: Int32s  # [5, nodes] as of `DraftTree`; parents are counted from the beginning of their own tree
    scores: Floats  # [nodes]
    starts: list[int]  # [batch + 1] where the tree of each request begins
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, trees: Seq[DraftTree]) -> DraftTrees:
        """Put trees behind each other."""
        starts = [0, *accumulate(map(len, trees))]
        return cls(np.concatenate([t.columns for t in trees], 1), np.concatenate([t.scores for t in trees]), starts)

    def count_sources(self) -> list[list[int]]:
        """Return how many nodes of each tree have each top source, [batch, names]."""
        batch, kinds = len(self.starts) - 1, len(self.names)
        owners = np.repeat(np.arange(batch), np.diff(self.starts))
        counts: Ints = np.bincount(owners * kinds + self.columns[3], minlength=batch * kinds)
        found: list[list[int]] = counts.reshape(batch, kinds).tolist()
        return found

    def split(self) -> list[DraftTree]:
        """Return the tree of each request."""
        columns, scores, names = self.columns, self.scores, self.names
        return [DraftTree(columns[:, first:last], scores[first:last], names) for first, last in pairwise(self.starts)]


@jit
def find_child(parents, tokens, node, token):  # type: ignore[no-untyped-def]
    for i in range(max(node, 0), len(parents)):
        if parents[i] == node and tokens[i] == token:
            return i
    return -1


NO_TREE = DraftTree(np.zeros((5, 0), np.int32), np.zeros(0, np.float32))
