"""Step results and the runner interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.models.weight_changes import ModelChange


@dataclass
class StepResult:
    """The results of a forward pass by row, before logits processors."""

    starts: Ints  # [batch] where the rows of each request begin in the arrays below
    choices: Ints  # [all rows] the most likely token after each, -1 where there are no logits
    logits: Callable[[int, Ints], torch.Tensor]  # (request, its rows) → [rows, vocabulary]
    top_ids: Int32s | None = None  # [all rows, k] most likely first; of any value where there are no logits
    top_logits: Floats | None = None
    sampled: Ints | None = None  # [all rows] sampled tokens, if the device sampled them
    num_rows: int = 0  # rows that were computed, padding included
    seconds: float = 0.0  # from the launch to the arrival of the results
    launch_seconds: float = 0.0  # of those: time of the host before the device could start
    hidden: Callable[[int, Ints], torch.Tensor] | None = None  # (request, its rows) → [rows, hidden], where wanted
    is_warm: bool = True  # False: later steps like it will be faster (captures, a larger step that stood in)


class StepShape(NamedTuple):
    """The shape of a captured step."""

    rows: int
    requests: int  # that it has room for
    predictions: int  # most likely tokens that it returns for each row


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return its result."""


class ModelRunner(Protocol):
    """Runs steps on a model."""

    model: BoundModel

    @property
    def limits(self) -> RunnerLimits:
        """The steps that it can take."""

    @property
    def name(self) -> str:
        """How steps are run, in words."""

    def create_cache(self) -> SlotKVCache:
        """Create an empty KV cache that suits this runner."""

    def refresh(self, everything: bool = False) -> ModelChange:
        """Follow changes of the model since the last request.

        `everything` also drops copies of weights that seem unchanged.
        """

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        """Start a step."""

    def missing(self, cache: SlotKVCache, requests: int, predictions: Seq[int]) -> list[StepShape]:
        """Return the shapes of steps of up to so many requests that are not captured yet, the largest first.

        `predictions` are the numbers of predictions that steps with drafts and prefills may ask for.
        """

    def capture(self, cache: SlotKVCache, shape: StepShape) -> None:
        """Capture a step ahead of its use."""

    def next_wanted(self) -> StepShape | None:
        """Return a shape that larger steps have stood in for, because a capture would have stalled other requests."""
