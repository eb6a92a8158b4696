"""A drafter that proposes what a function returns: for tests, where acceptance should not depend on the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy

Script = Callable[[Seq[int]], list[list[int]]]  # the text so far → drafts


@dataclass(frozen=True)
class Scripted(Strategy):
    """Proposes `script(ids)`, cut to `rows` tree nodes."""

    name: ClassVar[str] = "scripted"
    script: Script
    rows: int = 64

    def create(self, context: DraftContext) -> list[Drafter]:
        return [ScriptedDrafter(self.script)]

    @property
    def max_rows(self) -> int:
        return self.rows


class ScriptedDrafter:
    """Records every outcome that it observes in `seen`."""

    name = Scripted.name
    wants_predictions = False

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Outcome] = []

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        return Proposal.of([path[:limit] for path in self.script(ids)])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        self.seen.append(outcome)
