"""Lookahead / PAIN (Zhao et al. 2024): a trie of the branches of prompts and outputs, with counts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lookfar.core.arrays import Floats, Int32s, stack
from lookfar.drafters.base import MAX_SCORE, DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.errors import ConfigError
from lookfar.retrieval.draft_store import IN_TRIE, DraftStore
from lookfar.retrieval.trie import CountedTrie


@dataclass(frozen=True)
class Trie(Strategy):
    """Branches of the prompt and of all outputs, the most frequent first.

    `decoding_length` is the most rows, `branch_length` the deepest draft, `match` the longest suffix that is looked up.
    A token in `stop_words` is not looked up on its own.
    """

    name: ClassVar[str] = "trie"
    decoding_length: int = 63
    branch_length: int = 12
    match: int = 4
    shape: str = "hierarchical"
    source: str = "mixed"
    prompt_weight: float = 2.0
    stop_words: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_at_least(decoding_length=1, branch_length=1, match=1)
        self._check_choice(shape=("hierarchical", "parallel", "single"), source=("mixed", "prompt", "output"))
        if not self.prompt_weight > 0:
            raise ConfigError(f"trie: prompt_weight must be above 0, not {self.prompt_weight!r}.")
        if self.match > self.branch_length:
            raise ConfigError(f"trie: match must be at most branch_length ({self.branch_length}), not {self.match}.")

    def create(self, context: DraftContext) -> list[Drafter]:
        return [TrieDrafter(self, context.sources.store, context.prompt, context.remember)]

    @property
    def max_rows(self) -> int:
        return self.decoding_length


class TrieDrafter:
    """A trie of the request's own prompt, dropped with the request, beside the store's trie of outputs."""

    name = Trie.name
    wants_predictions = False

    def __init__(self, settings: Trie, store: DraftStore, prompt: Seq[int], remember: bool) -> None:
        self.settings = settings
        self.store = store
        self.remember = remember
        self.stop_words = frozenset(settings.stop_words)
        self.prompt = CountedTrie(settings.branch_length + 1, max_nodes=1 << 22)
        if settings.source != "output":
            self.prompt.insert(prompt)
        self.prompt_length = len(prompt)
        self.inserted = len(prompt)  # branches that start before this place are counted

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        settings = self.settings
        own_weight = settings.prompt_weight if settings.source != "output" else 0.0
        weight = 1.0 if settings.source != "prompt" else 0.0
        tail = np.array(ids[-settings.match :], dtype=np.int32)
        found: list[tuple[Int32s, Floats, int]] = []
        rows = 0
        # The longest suffix first; shorter ones while there are too few branches.
        for length in range(len(tail), 0, -1):
            if length == 1 and int(tail[-1]) in self.stop_words:
                break
            limits = settings.decoding_length - rows, min(limit, settings.branch_length)
            tokens, parents, depths, weights = self.store.branches(
                tail[len(tail) - length :], weight, self.prompt, own_weight, limits
            )
            if len(tokens):
                paths, counts = self._shaped(tokens, parents, depths, weights)
                found.append((paths, counts, length))
                rows += len(tokens)
            if rows >= settings.decoding_length or (found and settings.shape == "single"):
                break
        return _as_proposal(found)

    def _shaped(self, tokens: Int32s, parents: Int32s, depths: Int32s, weights: Floats) -> tuple[Int32s, Floats]:
        """Return the tree as branches: all of them, those that fit side by side, or the best one."""
        leaves = np.setdiff1d(np.arange(len(tokens)), parents)
        leaves = leaves[np.argsort(-weights[leaves], kind="stable")]
        if self.settings.shape == "parallel":
            leaves = leaves[np.cumsum(depths[leaves]) <= max(self.settings.decoding_length, depths[leaves[0]])]
        elif self.settings.shape == "single":
            leaf = 0  # the first node is the most frequent child, and so is the first one below it
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
        if not self.remember or self.settings.source == "prompt":
            return
        # A branch is counted once it is complete; the shorter ones at the end when the text ends.
        whole = len(ids) if outcome.finished else len(ids) - self.settings.branch_length
        if whole > self.inserted:
            last = min(len(ids), whole + self.settings.branch_length)
            self.store.count(ids[self.inserted : last], until=whole - self.inserted)
            self.inserted = whole
        if outcome.finished:
            self.store.share(ids[self.prompt_length :], IN_TRIE)


def _as_proposal(found: list[tuple[Int32s, Floats, int]]) -> Proposal:
    if not found:
        return Proposal()
    scores = np.concatenate([np.full(len(p), min(length, MAX_SCORE), np.int32) for p, _, length in found])
    return Proposal(stack([p for p, _, _ in found]), scores, np.concatenate([w for _, w, _ in found]))
