"""A drafter that says what it is told: for tests of the engine, where acceptance must not depend on luck."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from lookfar.config import Strategy
from lookfar.drafters.base import Drafter, Outcome, Proposal
from lookfar.memory import Memory
from lookfar.sequence import Request

Script = Callable[[Seq[int]], list[list[int]]]  # the text so far → drafts


@dataclass(frozen=True)
class Scripted(Strategy):
    """Drafts are `script(ids)`, cut to `rows` tree nodes."""

    name: ClassVar[str] = "scripted"
    script: Script
    rows: int = 64

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        return [ScriptedDrafter(self.script)]

    @property
    def max_rows(self) -> int:
        return self.rows


class ScriptedDrafter:
    """Keeps every outcome it is shown in `seen`."""

    name = Scripted.name
    wants_predictions = False

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Outcome] = []

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        return Proposal.of([path[:limit] for path in self.script(ids)])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        self.seen.append(outcome)
