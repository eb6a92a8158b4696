"""Totals of an engine since its start, for monitoring."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from lookfar.core.plan import StepPlan
from lookfar.engine.verify import Walk


@dataclass
class EngineCounts:
    """Counts that only grow. The engine's thread writes them; any thread may read them."""

    steps: int = 0  # forward passes
    rows: int = 0  # of those, padding excluded
    tokens: int = 0  # emitted
    decoded: int = 0  # requests that emitted tokens, added up over the steps

    def add(self, plan: StepPlan, walks: Seq[Walk | None]) -> None:
        """Count one step."""
        emitted = [len(walk.tokens) for walk in walks if walk is not None]
        self.steps += 1
        self.rows += int(sum(plan.lengths))
        self.tokens += sum(emitted)
        self.decoded += len(emitted)
