"""Token Recycling (Luo et al. 2024), with pairs: what the model last predicted after each token and pair of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lookfar.core.arrays import Int32s, Ints
from lookfar.drafters.base import (
    BatchDrafter,
    BatchOutcome,
    BatchProposal,
    DraftContext,
    Drafter,
    DrafterBatch,
    Outcome,
    Strategy,
)
from lookfar.retrieval.recycle_table import RecycleTable, RunnerUps, read_runner_ups


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
    def together(cls, drafters: Seq[RecycleDrafter]) -> RecycleBatch:
        return RecycleBatch(drafters)

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        rows = outcome.predictions
        if rows is None:
            return
        self.table.learn(rows.before, rows.tokens, rows.top_ids, rows.top_logits)
        last = outcome.emitted[-1] if outcome.emitted else -1
        self.runner_ups.set(rows.top_ids[outcome.last], rows.top_logits[outcome.last], last)


class RecycleBatch(DrafterBatch):
    def __init__(self, drafters: Seq[RecycleDrafter]) -> None:
        self.tables = [drafter.table for drafter in drafters]
        self.drafters = drafters
        self.runner_ups: Ints = np.array([drafter.runner_ups.address for drafter in drafters])
        self.members: dict[RecycleTable, list[int]] = {}
        for i, table in enumerate(self.tables):
            self.members.setdefault(table, []).append(i)

    def propose(self, texts: Seq[Seq[int]], limits: Int32s, rows: int) -> BatchProposal:
        tokens, logits, off_path = read_runner_ups(self.runner_ups)
        return BatchProposal(runner_ups=(tokens, logits), off_path=off_path)

    def observe(self, outcome: BatchOutcome) -> None:
        if outcome.top_ids is None or outcome.top_logits is None:
            return
        top = outcome.top_ids, outcome.top_logits
        if len(self.members) == 1:
            self.tables[0].learn_step(outcome.plan, outcome.about, top, self.runner_ups)
            return
        for table, members in self.members.items():
            table.learn_step(outcome.plan, outcome.about[members], top, self.runner_ups[members])
