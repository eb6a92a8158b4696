"""Jacobi iteration: draft a block, replace it by the model's choices after it, keep what has converged."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy


@dataclass(frozen=True)
class Jacobi(Strategy):
    """Jacobi iteration over `block` draft tokens in a row."""

    name: ClassVar[str] = "jacobi"
    block: int = 8

    def __post_init__(self) -> None:
        self._check_at_least(block=1)

    def create(self, context: DraftContext) -> list[Drafter]:
        return [JacobiDrafter(self, context.prompt)]

    @property
    def max_rows(self) -> int:
        return self.block


class JacobiDrafter:
    """One draft of `block` tokens. It starts as a copy of the prompt's end and converges from the left."""

    name = Jacobi.name
    wants_predictions = False

    def __init__(self, settings: Jacobi, prompt: Seq[int]) -> None:
        self.size = settings.block
        self.block = self._filled(list(prompt[-settings.block :]))

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        return Proposal.of([self.block[:limit]])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        # choices[i] is the model's choice for the place of block[i]; those before the new last token are text now.
        choices = outcome.along(self.block)
        converged = len(outcome.emitted)
        self.block = self._filled(choices[converged:] or [outcome.emitted[-1]])

    def _filled(self, tokens: list[int]) -> list[int]:
        return (tokens + [tokens[-1]] * self.size)[: self.size]
