"""Token Recycling (Luo et al. 2024), with pairs: what the model last predicted after each token and pair of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from lookfar.arrays import Floats, Int32s
from lookfar.config import Recycle
from lookfar.drafters.base import NO_TOKENS, NO_WEIGHTS, Outcome, Proposal
from lookfar.successors import Successors


class RecycleDrafter:
    """Offers successors for every place of the tree, and the runners-up of the root for the first."""

    name = Recycle.name
    wants_predictions = True

    def __init__(self, successors: Successors) -> None:
        self.successors = successors
        self.runners: Int32s = NO_TOKENS
        self.runner_logits: Floats = NO_WEIGHTS

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        return Proposal(successors=self.successors, runners=self.runners, runner_logits=self.runner_logits)

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        rows = outcome.predictions
        if rows is None:
            return
        self.successors.learn(rows.before, rows.tokens, rows.top_ids, rows.top_logits)
        best, logits = rows.top_ids[outcome.last], rows.top_logits[outcome.last]
        others: Any = slice(1, None)
        if outcome.emitted and outcome.emitted[-1] != best[0]:  # sampled, or a processor had its say
            others = best != outcome.emitted[-1]
        most = len(best) - 1
        self.runners, self.runner_logits = best[others][:most], logits[others][:most]
