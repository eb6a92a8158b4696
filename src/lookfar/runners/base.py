"""Step results and the runner interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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
    is_warm: bool = True  # False: something was compiled or captured, so the times mean nothing


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return its result."""


class ModelRunner(Protocol):
    """Runs steps on a model."""

    model: BoundModel
    limits: RunnerLimits
    name: str

    def create_cache(self) -> SlotKVCache:
        """Create an empty KV cache that suits this runner."""

    def refresh(self, everything: bool = False) -> ModelChange:
        """Follow changes of the model since the last request.

        `everything` also drops copies of weights that seem unchanged.
        """

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        """Start a step."""
