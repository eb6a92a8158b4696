"""The flat runner: on a CPU, the rows of all requests of a step lie side by side, without padding."""

from __future__ import annotations

from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np
import torch

from lookfar.core.arrays import Ints
from lookfar.core.plan import RequestPlan, RunnerLimits, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel, FlatRows, feeds_embeds
from lookfar.models.request_attention import attention_name, step_attention
from lookfar.models.self_check import agree, branched_plan
from lookfar.models.weight_changes import ModelChange
from lookfar.runners.base import PendingStep, StepResult
from lookfar.runners.eager import EagerRunner
from lookfar.runners.flat_writer import FlatWriter
from lookfar.sampling.sampler import greedy, top_k

FLAT = RunnerLimits(padded=False)


def why_not_flat(model: BoundModel) -> str:
    """Return why a model is never run in flat steps, whatever its code is; empty if it may be."""
    if any(parameter.device.type != "cpu" for parameter in model.model.parameters()):
        return "it is not on a CPU"
    if model.support.alibi or model.support.one_by_one:
        return "its attention adds a bias by position"
    return ""


class FlatRunner(EagerRunner):
    """Runs a step as rows side by side; a step that any causal model can run as it is stays a block.

    Whether a model can be run this way is checked with the first step that needs it. If it cannot, and until then, all
    steps are padded blocks.
    """

    name = "flat"

    def __init__(self, model: BoundModel) -> None:
        super().__init__(model)
        self._agrees: bool | None = None  # with padded steps; None: not checked yet
        self._checked = self._state()

    def _state(self) -> tuple[object, ...]:
        return self.model.attention, self.model.fingerprint.structure

    @property
    def limits(self) -> RunnerLimits:  # type: ignore[override]
        return FLAT if self._agrees else EagerRunner.limits

    def refresh(self, everything: bool = False) -> ModelChange:
        change = super().refresh(everything)
        if self._state() != self._checked:
            self._agrees, self._checked = None, self._state()
        return change

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        if plan.is_causal:
            return super().launch(plan, cache)
        is_warm = self._agrees is not None
        if self._agrees is None:
            self._agrees = not why_not_flat(self.model) and agrees_with_padded(self.model)
        if not self._agrees:
            return super().launch(plan, cache)
        started = perf_counter()
        step = FlatStep(plan, flat_logits(self.model, plan, cache), started)
        step.is_warm = is_warm
        return step


def flat_logits(model: BoundModel, plan: StepPlan, cache: SlotKVCache) -> torch.Tensor:
    """Run a flat step. Returns the logits that are needed, [logit rows of all requests, vocabulary]."""
    requests, support = plan.requests, model.support
    cache.apply_moves()
    slots = [cache.slot_of(rows.kv) for rows in requests]
    tokens = torch.from_numpy(np.concatenate([rows.tokens for rows in requests]))
    positions = torch.from_numpy(np.concatenate([rows.positions for rows in requests]))
    if support.max_positions is not None:
        # Only window rows can point past the last position, and what they compute there is never used.
        positions = positions.clamp(max=support.max_positions - 1)
    places = np.concatenate([rows.num_cached + np.arange(len(rows)) for rows in requests])
    writer = FlatWriter(cache.buffers, torch.from_numpy(np.repeat(slots, plan.lengths)), torch.from_numpy(places))
    embeds = model.embed(tokens, plan, lambda all_rows: all_rows.split(plan.lengths)) if feeds_embeds(plan) else None
    logit_rows = torch.from_numpy(flat_logit_rows(plan))
    wanted = logit_rows if len(logit_rows) else torch.zeros(1, dtype=torch.long)  # a model takes no empty list
    kinds = list(support.kinds.values())
    with model.attending(attention_name(model.attention)), model.packed_weights():
        with step_attention(plan, slots, kinds, model.model.dtype) as masks:
            logits = model.forward_flat(FlatRows(tokens, positions, masks, embeds, wanted), writer, model.model)
    return logits[: len(logit_rows)]


def flat_logit_rows(plan: StepPlan) -> Ints:
    """Return the rows of a flat step whose logits are needed, ascending."""
    return np.flatnonzero(np.concatenate([rows.needs_logits for rows in plan.requests]))


class FlatStep:
    """The logits of a flat step, [logit rows of all requests, vocabulary]."""

    is_warm = True

    def __init__(self, plan: StepPlan, logits: torch.Tensor, started: float) -> None:
        self.plan = plan
        self.all_logits = logits
        self.logit_rows = flat_logit_rows(plan)
        self.starts = list(accumulate(plan.lengths, initial=0))
        self.seconds = perf_counter() - started

    def result(self) -> StepResult:
        plan, asked, top = self.plan, perf_counter(), None
        choices = self._spread(greedy(self.all_logits), -1)
        if plan.top_k:
            ids, values = top_k(self.all_logits, plan.top_k)
            top = [self._split(self._spread(found, 0)) for found in (ids, values)]
        return StepResult(
            np.arange(plan.width),
            self._split(choices),
            self.logits,
            *(top or (None, None)),
            num_rows=self.starts[-1],
            seconds=self.seconds + perf_counter() - asked,
            is_warm=self.is_warm,
        )

    def logits(self, request: int, rows: Ints) -> torch.Tensor:
        """Return the logits of some rows of a request, [rows, vocabulary]."""
        return self.all_logits[torch.from_numpy(np.searchsorted(self.logit_rows, self.starts[request] + rows))]

    def _spread(self, values: np.ndarray, missing: int) -> np.ndarray:
        """Place values of the logit rows at their rows."""
        spread = np.full((self.starts[-1], *values.shape[1:]), missing, values.dtype)
        spread[self.logit_rows] = values
        return spread

    def _split(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the part of each request."""
        return [values[first:last] for first, last in pairwise(self.starts)]


def agrees_with_padded(model: BoundModel) -> bool:
    """Whether a small flat step of two requests gives the logits of the padded one."""
    plan = check_plan(model.vocab_size)
    expected = model.forward(plan, _two_slots())
    try:
        found = flat_logits(model, plan, _two_slots())
    except Exception:  # code of the model that expects other masks or caches
        return False
    return agree(found, torch.cat([logits[:count] for logits, count in zip(expected, plan.lengths, strict=True)]))


def check_plan(vocab_size: int) -> StepPlan:
    """Return a step of two requests of different lengths that needs all logits."""
    (longer,) = branched_plan(vocab_size).requests
    pending = longer.pending[:3]
    return StepPlan([longer, RequestPlan(pending, 0, kv=1, predict=len(pending), tree=DraftTree.from_paths([pending]))])


def _two_slots() -> SlotKVCache:
    cache = SlotKVCache(2, 64)
    for _ in range(2):
        cache.allocate()
    return cache
