"""Token Recycling (Luo et al. 2024), with pairs: what the model last predicted after each token and pair of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

from lookfar.core.arrays import Floats, Int32s
from lookfar.drafters.base import NO_FLOATS, NO_TOKENS, DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.retrieval.recycle_table import RecycleTable


@dataclass(frozen=True)
class Recycle(Strategy):
    """Recycled predictions after each token and pair of tokens, and the runner-ups of the last token."""

    name: ClassVar[str] = "recycle"
    rows: int = 64

    def __post_init__(self) -> None:
        self._check_at_least(rows=1)

    def create(self, context: DraftContext) -> list[Drafter]:
        sources = context.sources
        return [RecycleDrafter(sources.recycle_table if context.remember else sources.private_table())]

    @property
    def max_rows(self) -> int:
        return self.rows


class RecycleDrafter:
    """Proposes a table that continues every node of the tree, and the runner-ups of the last token as first tokens."""

    name = Recycle.name
    wants_predictions = True

    def __init__(self, table: RecycleTable) -> None:
        self.table = table
        self.runner_ups: Int32s = NO_TOKENS
        self.runner_up_logits: Floats = NO_FLOATS

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        return Proposal(table=self.table, runner_ups=self.runner_ups, runner_up_logits=self.runner_up_logits)

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        rows = outcome.predictions
        if rows is None:
            return
        self.table.learn(rows.before, rows.tokens, rows.top_ids, rows.top_logits)
        top, logits = rows.top_ids[outcome.last], rows.top_logits[outcome.last]
        others: Any = slice(1, None)
        if outcome.emitted and outcome.emitted[-1] != top[0]:  # sampled, or changed by a logits processor
            others = top != outcome.emitted[-1]
        most = len(top) - 1
        self.runner_ups, self.runner_up_logits = top[others][:most], logits[others][:most]
