"""Token Recycling (Luo et al. 2024), with pairs: what the model last predicted after each token and pair of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lookfar.drafters.base import BatchDrafter, BatchOutcome, BatchProposal, DraftContext, Drafter, Outcome, Strategy
from lookfar.retrieval.recycle_table import RecycleTable, RunnerUps

if TYPE_CHECKING:
    from typing_extensions import Self


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


class RecycleDrafter(BatchDrafter):
    """Proposes a table that continues every node of the tree, and the runner-ups of the last token as first tokens."""

    name = Recycle.name
    wants_predictions = wants_steps = True

    def __init__(self, table: RecycleTable) -> None:
        self.table = table
        self.runner_ups = RunnerUps()

    @classmethod
    def propose_all(cls, drafters: Seq[Self], texts: Seq[Seq[int]], limits: Seq[int]) -> BatchProposal:
        runner_ups = RunnerUps.read_all([drafter.runner_ups for drafter in drafters])
        return BatchProposal(tables=[drafter.table for drafter in drafters], runner_ups=runner_ups)

    @classmethod
    def observe_all(cls, drafters: Seq[Self], outcome: BatchOutcome) -> None:
        if outcome.top_ids is None or outcome.top_logits is None:
            return
        by_table: dict[int, list[int]] = {}
        for i, drafter in enumerate(drafters):
            by_table.setdefault(id(drafter.table), []).append(i)
        top = outcome.top_ids, outcome.top_logits
        for members in by_table.values():
            about = outcome.about if len(members) == len(drafters) else outcome.about[members]
            runner_ups = [drafters[i].runner_ups for i in members]
            drafters[members[0]].table.learn_step(
                outcome.plan, about, (outcome.top_ids, outcome.top_logits), runner_ups
            )

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        rows = outcome.predictions
        if rows is None:
            return
        self.table.learn(rows.before, rows.tokens, rows.top_ids, rows.top_logits)
        last = outcome.emitted[-1] if outcome.emitted else -1
        self.runner_ups.set(rows.top_ids[outcome.last], rows.top_logits[outcome.last], last)
