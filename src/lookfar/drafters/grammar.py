"""Forced text of a grammar: punctuation and field names that have to come next."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

from lookfar.drafters.base import MAX_SCORE, DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.sampling.grammar import Grammar, GrammarCursor, GrammarProcessor

MAX_FORCED = 32  # tokens of a draft; longer text comes in several steps


@dataclass(frozen=True)
class ForcedText(Strategy):
    """Drafts the text that a grammar leaves no choice about."""

    name: ClassVar[str] = "grammar"
    grammar: Grammar

    def create(self, context: DraftContext) -> list[Drafter]:
        return [ForcedTextDrafter(self.grammar, len(context.prompt))]

    @property
    def max_rows(self) -> int:
        return MAX_FORCED


class ForcedTextDrafter:
    """Follows the output through the grammar."""

    name = ForcedText.name
    wants_predictions = False

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self.cursor = GrammarCursor(grammar)
        self.prompt_length = prompt_length

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        if not self.cursor.move_to(list(ids[self.prompt_length :])):
            return Proposal()
        tokens = self.cursor.forced()[: min(limit, MAX_FORCED)]
        return Proposal.of([tokens], score=MAX_SCORE) if tokens else Proposal()

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass


def forced_text(processors: Seq[Any]) -> tuple[Strategy, ...]:
    """Return a strategy for each grammar among some logits processors."""
    return tuple(ForcedText(p.grammar) for p in processors if isinstance(p, GrammarProcessor))
