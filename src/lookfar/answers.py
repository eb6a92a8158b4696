"""What the model said after the rows of a step, and the steps that have it said as torch runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lookfar.arrays import Floats, Int32s, Ints
from lookfar.choose import best, greedy
from lookfar.tree import Plan

if TYPE_CHECKING:
    from lookfar.cache import SlotCache
    from lookfar.model import BoundModel
    from lookfar.sequence import Sequence


@dataclass
class Answers:
    """Without processors, except for what was drawn."""

    kept: Ints  # the answered rows of a sequence, ascending; the same ones for all
    choices: Seq[Ints]  # of each sequence, by row, -1 where the logits were not wanted
    logits: Callable[[int, Ints], torch.Tensor]  # of some rows of a sequence, [rows, vocabulary]
    top_ids: Seq[Int32s] | None = None  # of each sequence, [answered rows, k] best first
    top_logits: Seq[Floats] | None = None
    drawn: Seq[Ints] = ()  # of each sequence, by row: sampled tokens, if the device drew them already


@dataclass(frozen=True)
class Room:
    """What a step can hold, and how its rows are counted."""

    rows: int | None = None  # of all sequences together; None: any number
    depth: int | None = None  # of a tree
    packed: bool = False  # rows lie side by side; otherwise every sequence is padded to the widest
    fixed: bool = False  # a step that emits tokens always has the same number of rows, used or not


class Steps(Protocol):
    """What runs the steps of an engine."""

    model: BoundModel
    room: Room
    name: str
    launching: float  # seconds that the host spent on starting the last step, where the device works by itself
    first_of_its_kind: bool  # was something made for the last step that later ones use again?

    def start(self, plan: Plan, cache: SlotCache, group: Seq[Sequence], top: int) -> Callable[[], Answers]:
        """Begin a step; its answers, with `top` predictions for each row, are there when they are asked for."""

    def fed(self, plan: Plan) -> int:
        """How many rows such a step costs, padding included."""

    def cache_size(self, slots: int, cells: int, most_slots: int) -> tuple[int, int]:
        """How large to make a cache that is to hold at least so much."""


class EagerSteps:
    """Every step as one call of the model."""

    name = "eager"
    room = Room()
    launching = 0.0
    first_of_its_kind = False

    def __init__(self, model: BoundModel) -> None:
        self.model = model

    def start(self, plan: Plan, cache: SlotCache, group: Seq[Sequence], top: int) -> Callable[[], Answers]:
        logits = self.model.forward(plan, cache, [sequence.request.embeds for sequence in group])
        return lambda: answer(plan, logits, top)

    def fed(self, plan: Plan) -> int:
        return plan.batch * plan.width

    def cache_size(self, slots: int, cells: int, most_slots: int) -> tuple[int, int]:
        return slots, -(-cells // 64) * 64


def answer(plan: Plan, logits: torch.Tensor, top: int) -> Answers:
    """Read logits of the kept rows, [batch, kept, vocabulary]."""

    def of(sequence: int, rows: Ints) -> torch.Tensor:
        places = torch.from_numpy(np.searchsorted(plan.kept, rows)).to(logits.device)
        return logits[sequence, places]

    if not len(plan.kept):
        return Answers(plan.kept, list(np.full(plan.tokens.shape, -1)), of)
    return Answers(plan.kept, list(plan.by_row(greedy(logits))), of, *(best(logits, top) if top else ()))
