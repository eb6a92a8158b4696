"""The trie of branches (Zhao et al. 2024): what followed the text's last tokens, in prompt and outputs, by count."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.arrays import Floats, Int32s
from lookfar.config import Trie
from lookfar.drafters.base import Outcome, Proposal, stack
from lookfar.store import Store
from lookfar.trie import CountedTrie


class TrieDrafter:
    """A trie of the request's own prompt, gone with the request, beside the store's trie of outputs, shared by all."""

    name = Trie.name
    wants_predictions = False

    def __init__(self, config: Trie, store: Store, prompt: list[int], remember: bool) -> None:
        self.config = config
        self.store = store
        self.remember = remember
        self.stop_words = frozenset(config.stop_words)
        self.prompt = CountedTrie(config.branch_length + 1, max_nodes=1 << 22)
        if config.source != "output":
            self.prompt.insert(prompt)
        self.inserted = len(prompt)  # branches that start before this are counted

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        config = self.config
        tail = np.array(ids[-config.match :], dtype=np.int32)
        found: list[tuple[Int32s, Floats, int]] = []
        rows = 0
        # The longest suffix first; shorter ones while there are too few branches.
        for length in range(len(tail), 0, -1):
            if length == 1 and int(tail[-1]) in self.stop_words:
                break
            tokens, parents, depths, weights = self.store.branches(
                tail[len(tail) - length :],
                self.prompt,
                config.prompt_weight if config.source != "output" else 0.0,
                1.0 if config.source != "prompt" else 0.0,
                config.decoding_length - rows,
                min(limit, config.branch_length),
            )
            if len(tokens):
                paths, counts = self._shaped(tokens, parents, depths, weights)
                found.append((paths, counts, length))
                rows += len(tokens)
            if rows >= config.decoding_length or (found and config.shape == "single"):
                break
        return _as_proposal(found)

    def _shaped(self, tokens: Int32s, parents: Int32s, depths: Int32s, weights: Floats) -> tuple[Int32s, Floats]:
        """The tree as branches: all of them, those that fit side by side, or the best one."""
        leaves = np.setdiff1d(np.arange(len(tokens)), parents)
        leaves = leaves[np.argsort(-weights[leaves], kind="stable")]
        if self.config.shape == "parallel":
            leaves = leaves[np.cumsum(depths[leaves]) <= max(self.config.decoding_length, depths[leaves[0]])]
        elif self.config.shape == "single":
            leaf = 0  # the first chosen is the most frequent child; so is the first chosen below it
            while len(below := np.flatnonzero(parents == leaf)):
                leaf = int(below[0])
            leaves = np.array([leaf])
        paths = np.full((len(leaves), int(depths.max())), -1, np.int32)
        node = leaves.copy()
        while (live := node >= 0).any():
            paths[np.flatnonzero(live), depths[node[live]] - 1] = tokens[node[live]]
            node = np.where(live, parents[node], -1)
        return paths, weights[leaves]

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if not self.remember or self.config.source == "prompt":
            return
        # A branch is counted once all of it is there; the shorter ones at the end, when the text ends.
        whole = len(ids) if outcome.finished else len(ids) - self.config.branch_length
        if whole > self.inserted:
            last = min(len(ids), whole + self.config.branch_length)
            self.store.count(ids[self.inserted : last], until=whole - self.inserted)
            self.inserted = whole


def _as_proposal(found: list[tuple[Int32s, Floats, int]]) -> Proposal:
    if not found:
        return Proposal()
    grades = np.concatenate([np.full(len(p), min(length, 15), np.int32) for p, _, length in found])
    return Proposal(stack([p for p, _, _ in found]), grades, np.concatenate([w for _, w, _ in found]))
