"""Prompt lookup, as in transformers and LLMA: copy what followed the first earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lookfar.drafters.base import MAX_SCORE, DraftContext, Drafter, Outcome, Proposal, Strategy


@dataclass(frozen=True)
class PromptLookup(Strategy):
    """Copies at most `length` tokens after the first place with the same last `ngram` tokens, or with fewer."""

    name: ClassVar[str] = "prompt_lookup"
    length: int = 10
    ngram: int = 2

    def __post_init__(self) -> None:
        self._check_at_least(length=1, ngram=1)

    def create(self, context: DraftContext) -> list[Drafter]:
        return [PromptLookupDrafter(self)]

    @property
    def max_rows(self) -> int:
        return self.length


class PromptLookupDrafter:
    """Proposes one draft. It keeps no state but the text itself."""

    name = PromptLookup.name
    wants_predictions = False

    def __init__(self, settings: PromptLookup) -> None:
        self.settings = settings

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        text = np.array(ids)
        for length in range(min(self.settings.ngram, len(text) - 1), 0, -1):
            same = np.ones(len(text) - length, dtype=bool)  # places with a token behind them
            for i in range(length):
                same &= text[i : i + len(same)] == text[len(text) - length + i]
            if same.any():
                start = int(same.argmax()) + length
                draft = ids[start : start + min(limit, self.settings.length)]
                return Proposal.of([draft], score=min(length, MAX_SCORE))
        return Proposal()

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass
