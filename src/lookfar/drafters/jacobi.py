"""Plain Jacobi iteration: guess a block, replace it by the model's answers, keep what has settled."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from lookfar.config import Jacobi
from lookfar.drafters.base import Outcome, Proposal


class JacobiDrafter:
    """One chain of `block` tokens. It starts as a copy of the prompt's end and converges from the left."""

    name = Jacobi.name
    wants_predictions = False

    def __init__(self, config: Jacobi, prompt: list[int]) -> None:
        self.block = config.block
        self.guess = self._filled(prompt[-config.block :])

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        return Proposal.of([self.guess[:limit]])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        # answers[i] is the model's choice for the place of guess[i]; those before the new root are now text.
        answers = outcome.along(self.guess)
        settled = len(outcome.emitted)
        self.guess = self._filled(answers[settled:] or [outcome.emitted[-1]])

    def _filled(self, tokens: list[int]) -> list[int]:
        return (tokens + [tokens[-1]] * self.block)[: self.block]
