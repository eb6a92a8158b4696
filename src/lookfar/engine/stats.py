"""Counts of a request; every ratio is derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lookfar.core.tree import DraftTree


@dataclass
class DrafterStats:
    """How many verified nodes had this source as their top source, and how many of them were accepted."""

    proposed: int = 0
    accepted: int = 0


@dataclass
class Stats:
    """The counts of one request, or of several added up."""

    step_sizes: list[int] = field(default_factory=list)  # tokens that each step emitted
    rows: int = 0  # rows of those steps: last token, draft tree and lookahead window
    replayed_rows: int = 0  # beside those: tokens that were fed again, because a recurrent state was put back
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of those: in the KV cache already
    seconds: float = 0.0  # from the start of the prefill to the last token
    host_seconds: float = 0.0  # of those: drafting, planning, verifying, learning; in a batch, this request's share
    drafters: dict[str, DrafterStats] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.step_sizes)

    @property
    def steps(self) -> int:
        """Forward passes that emitted tokens; prefill chunks are not counted."""
        return len(self.step_sizes)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rows_per_step(self) -> float:
        return self.rows / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def count_drafts(self, tree: DraftTree, accepted: Seq[int]) -> None:
        """Count the nodes of a tree and the accepted ones by their top source."""
        if len(tree):
            sources = tree.top_sources
            proposed = np.bincount(sources, minlength=len(tree.names)).tolist()
            self.add_drafts(tree.names, proposed, [int(sources[node]) for node in accepted])

    def add_drafts(self, names: Seq[str], proposed: Seq[int], accepted: Seq[int]) -> None:
        """Count draft tokens: how many have each of the named top sources, and the sources of the accepted ones."""
        for name, count in zip(names, proposed, strict=True):
            if count:
                self.drafter(name).proposed += count
        for source in accepted:
            self.drafter(names[source]).accepted += 1

    def drafter(self, name: str) -> DrafterStats:
        if name not in self.drafters:
            self.drafters[name] = DrafterStats()
        return self.drafters[name]

    def copy(self) -> Stats:
        """Return an independent copy."""
        drafters = {name: replace(counts) for name, counts in self.drafters.items()}
        return replace(self, step_sizes=list(self.step_sizes), drafters=drafters)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": self.tokens_per_step,
            "rows": self.rows,
            "rows_per_step": self.rows_per_step,
            "replayed_rows": self.replayed_rows,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "seconds": self.seconds,
            "host_seconds": self.host_seconds,
            "tokens_per_second": self.tokens_per_second,
            "step_sizes": self.step_sizes,
            "drafters": {n: {"proposed": d.proposed, "accepted": d.accepted} for n, d in self.drafters.items()},
        }


def add_up(parts: Iterable[Stats]) -> Stats:
    """Add up the counts of several requests; the added `seconds` of a batch are not wall-clock time."""
    total = Stats()
    for part in parts:
        total.step_sizes += part.step_sizes
        total.rows += part.rows
        total.replayed_rows += part.replayed_rows
        total.prompt_tokens += part.prompt_tokens
        total.reused_tokens += part.reused_tokens
        total.seconds += part.seconds
        total.host_seconds += part.host_seconds
        for name, counts in part.drafters.items():
            total.drafter(name).proposed += counts.proposed
            total.drafter(name).accepted += counts.accepted
    return total


def is_natural(output: Seq[int], gram: int = 16, share: float = 0.15) -> bool:
    """Whether an output is free of loops: fewer than 15 % of its tokens complete a 16-gram that it already contains.

    Small models fall into loops, which any drafter predicts; figures are therefore given with and without them.
    """
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for end in range(gram, len(output) + 1):
        window = tuple(output[end - gram : end])
        repeats += window in seen
        seen.add(window)
    return repeats < share * max(len(output), 1)
