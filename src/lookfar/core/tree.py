"""Draft trees: proposed continuations of a text, with shared prefixes stored once. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.jit import jit

ROOT = -1  # the parent of a tree's first nodes: the last token of the text


@dataclass(eq=False, slots=True)
class DraftTree:
    """Draft tokens after the last token of a text. Parents come before their children."""

    tokens: Int32s
    parents: Int32s  # `ROOT` for a first token
    depths: Int32s  # 1 for a first token
    top_sources: Int32s  # the source with the strongest evidence for a node, as an index into `names`
    scores: Floats  # the estimated probability that a node is accepted
    num_sources: Int32s  # how many sources proposed a node
    names: tuple[str, ...] = ()

    @classmethod
    def from_paths(cls, paths: Seq[Seq[int]], source: str = "") -> DraftTree:
        """Build the tree of some continuations, each with score 1."""
        places: dict[tuple[int, ...], int] = {}
        for path in paths:
            for depth in range(1, len(path) + 1):
                places.setdefault(tuple(path[:depth]), len(places))
        columns = [[p[-1], places.get(p[:-1], ROOT), len(p), 0] for p in places]
        tokens, parents, depths, sources = np.array(columns, dtype=np.int32).reshape(-1, 4).T
        ones = np.ones(len(places))
        return cls(tokens, parents, depths, sources, ones.astype(np.float32), ones.astype(np.int32), (source,))

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` (or of `ROOT`) that holds `token`."""
        found: int = find_child(self.parents, self.tokens, node, token) if len(self.tokens) else -1
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


@jit
def find_child(parents, tokens, node, token):  # type: ignore[no-untyped-def]
    for i in range(max(node, 0), len(parents)):
        if parents[i] == node and tokens[i] == token:
            return i
    return -1


NO_TREE = DraftTree(*(np.zeros(0, np.int32),) * 4, np.zeros(0, np.float32), np.zeros(0, np.int32))
