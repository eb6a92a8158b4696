"""Prompt lookup, as transformers and LLMA do it: the first place where the last tokens stood before, copied onwards."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.config import PromptLookup
from lookfar.drafters.base import Outcome, Proposal


class PromptLookupDrafter:
    """One draft: what followed the first place with the same last `ngram` tokens, else with fewer."""

    name = PromptLookup.name
    wants_predictions = False

    def __init__(self, config: PromptLookup) -> None:
        self.config = config

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        text = np.array(ids)
        for length in range(min(self.config.ngram, len(text) - 1), 0, -1):
            same = np.ones(len(text) - length, dtype=bool)  # places with a token behind them
            for i in range(length):
                same &= text[i : i + len(same)] == text[len(text) - length + i]
            if same.any():
                start = int(same.argmax()) + length
                return Proposal.of([ids[start : start + min(limit, self.config.length)]], grade=min(length, 15))
        return Proposal()

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass  # the text is all it looks at
