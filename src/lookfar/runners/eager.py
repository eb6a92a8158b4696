"""The eager runner: every step is one call of the model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

import numpy as np
import torch

from lookfar.core.arrays import Ints
from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.kvcache.recurrent import RecurrentKVCache
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.models.time_steps import has_time_step_limits
from lookfar.models.weight_changes import ModelChange
from lookfar.runners.base import PendingStep, StepResult, StepShape
from lookfar.sampling.sampler import greedy, top_k


class EagerRunner:
    """Runs steps as torch runs them, padded to the widest request."""

    name = "eager"

    def __init__(self, model: BoundModel) -> None:
        self.model = model

    @property
    def limits(self) -> RunnerLimits:
        support = self.model.support
        return RunnerLimits(chain=support.mode == "chain", recurrent=support.recurrent)

    def create_cache(self) -> SlotKVCache:
        if not self.model.support.recurrent:
            return SlotKVCache()
        model = self.model.model
        same = not has_time_step_limits(model)  # they hold for prompts and not for answers
        return RecurrentKVCache(model.config, reuse=same)

    def refresh(self, everything: bool = False) -> ModelChange:
        return self.model.refresh(everything)

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        started = perf_counter()
        logits = self.model.forward(plan, cache)
        return EagerStep(plan, logits, started)

    def missing(self, cache: SlotKVCache, requests: int, predictions: Seq[int]) -> list[StepShape]:
        return []  # nothing is captured

    def capture(self, cache: SlotKVCache, shape: StepShape) -> None:
        raise NotImplementedError("Eager steps are not captured.")

    def next_wanted(self) -> StepShape | None:
        return None


class EagerStep:
    """The logits of a step, [batch, logit rows, vocabulary]."""

    def __init__(self, plan: StepPlan, logits: torch.Tensor, started: float) -> None:
        self.plan = plan
        self.all_logits = logits
        self.started = started
        self.launched = perf_counter()

    def result(self) -> StepResult:
        plan, asked = self.plan, perf_counter()
        choices, top_ids, top_logits = np.full(plan.tokens.shape, -1), None, None
        if len(plan.logit_rows):
            choices = plan.spread(greedy(self.all_logits))
            if plan.top_k:
                top_ids, top_logits = (
                    plan.spread(top).reshape(-1, top.shape[-1]) for top in top_k(self.all_logits, plan.top_k)
                )
        seconds = perf_counter() - self.started
        if self.all_logits.device.type == "cpu":
            seconds -= asked - self.launched  # the host did something else meanwhile
        return StepResult(
            plan.width * np.arange(plan.batch),
            choices.reshape(-1),
            self.logits,
            top_ids,
            top_logits,
            num_rows=plan.batch * plan.width,
            seconds=seconds,
        )

    def logits(self, request: int, rows: Ints) -> torch.Tensor:
        """Return the logits of some rows of a request, [rows, vocabulary]."""
        places = torch.from_numpy(np.searchsorted(self.plan.logit_rows, rows)).to(self.all_logits.device)
        return self.all_logits[request, places]
