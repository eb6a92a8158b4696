"""The seam between the engine and whatever guesses: two methods, token ids and NumPy arrays, no torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from lookfar.tree import NO_RIDERS, ROOT, Ints, Riders, TokenTree


@dataclass(frozen=True)
class Proposal:
    """Continuations of the text, best first, and rows that ride along to make later ones."""

    drafts: Seq[Seq[int]] = ()
    riders: Riders = NO_RIDERS


@dataclass(frozen=True)
class Outcome:
    """What one step showed about one sequence."""

    emitted: list[int]  # the accepted tokens and the model's own next choice
    tree: TokenTree
    choices: Ints  # [1 + nodes] the model's choice after the root, then after each node of the tree
    rider_choices: Ints = field(repr=False)  # [riders of this drafter] of use where it was wanted

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

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        """Guess what follows `ids`, at most `limit` tokens deep."""

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        """Learn from a step; `ids` already ends in what the step emitted."""
