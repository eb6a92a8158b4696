"""The seam between the engine and whatever guesses: two methods, token ids and NumPy arrays, no torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lookfar.arrays import Floats, Int32s, Ints
from lookfar.successors import Successors
from lookfar.tree import NO_RIDERS, ROOT, Riders, TokenTree

NO_DRAFTS: Int32s = np.zeros((0, 0), np.int32)
NO_TOKENS: Int32s = np.zeros(0, np.int32)
NO_WEIGHTS: Floats = np.zeros(0, np.float32)


def stack(drafts: Seq[Int32s]) -> Int32s:
    """Drafts of several depths, one below the other, -1 behind the shorter ones."""
    if len(drafts) == 1:
        return drafts[0]
    deepest = max((part.shape[1] for part in drafts), default=0)
    stacked = np.full((sum(map(len, drafts)), deepest), -1, np.int32)
    row = 0
    for part in drafts:
        stacked[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return stacked


@dataclass(slots=True)
class Proposal:
    """Continuations of the text, best first; what may follow anything; and rows that ride along to make later ones."""

    drafts: Int32s = field(default_factory=lambda: NO_DRAFTS)  # [k, depth] tokens, -1 behind the end of a draft
    grades: Int32s = field(
        default_factory=lambda: NO_TOKENS
    )  # [k] 0 … 15: how good a match is behind each, on the drafter's own scale
    weights: Floats = field(default_factory=lambda: NO_WEIGHTS)  # [k] how much each counts beside others of its grade
    riders: Riders = NO_RIDERS
    successors: Successors | None = None
    runners: Int32s = field(
        default_factory=lambda: NO_TOKENS
    )  # what came next to the root in the prediction it was chosen from
    runner_logits: Floats = field(default_factory=lambda: NO_WEIGHTS)

    @classmethod
    def of(cls, paths: Seq[Seq[int]], grade: int = 0, riders: Riders = NO_RIDERS) -> Proposal:
        """Drafts of one grade, given as lists."""
        drafts = np.full((len(paths), max(map(len, paths), default=0)), -1, np.int32)
        for row, path in zip(drafts, paths, strict=True):
            row[: len(path)] = path
        return cls(drafts, np.full(len(paths), grade, np.int32), np.ones(len(paths), np.float32), riders)


@dataclass(slots=True)
class Predictions:
    """The best next tokens after rows of the text and of the tree, best first."""

    before: Int32s  # [n] the token before each row's, -1 where there is none
    tokens: Int32s  # [n]
    top_ids: Int32s  # [n, k]
    top_logits: Floats  # [n, k]


@dataclass(slots=True)
class Outcome:
    """What one step showed about one sequence."""

    emitted: list[int]  # the accepted tokens and the model's own next choice; nothing after a piece of a prompt
    tree: TokenTree
    choices: Ints  # [1 + nodes] the model's choice after the root, then after each node of the tree
    rider_choices: Ints = field(repr=False)  # [riders of this drafter] of use where it was wanted
    predictions: Predictions | None = None  # for drafters that want them
    last: int = -1  # which of those rows the last emitted token was chosen from
    finished: bool = False  # the request ends with this step

    def along(self, path: Seq[int]) -> list[int]:
        """The model's choices after the root and after each token of `path`, as far as the tree holds it."""
        node, found = ROOT, [int(self.choices[0])]
        for token in path:
            child = self.tree.child(node, token)
            if child is None:
                break
            node = child
            found.append(int(self.choices[1 + node]))
        return found


class Drafter(Protocol):
    """A source of guesses for one sequence. `ids` is its whole text so far, prompt included."""

    name: str
    wants_predictions: bool  # of every row, those of the prompt among them

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        """Guess what follows `ids`, at most `limit` tokens deep."""

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        """Learn from a step; `ids` already ends in what the step emitted."""
