"""The flat runner: on a CPU, the rows of all requests of a step lie side by side, without padding."""

from __future__ import annotations

from itertools import accumulate
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import RequestPlan, RunnerLimits, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.attention_name import FlatName
from lookfar.models.binding import BoundModel, FlatRows, feeds_embeds
from lookfar.models.hidden_states import HiddenStates, recorded
from lookfar.models.request_attention import step_attention
from lookfar.models.self_check import agree, branched_plan, taken_slots
from lookfar.models.weight_changes import ModelChange
from lookfar.runners.base import PendingStep, StepResult
from lookfar.runners.eager import EagerRunner
from lookfar.runners.flat_writer import FlatWriter
from lookfar.sampling.sampler import greedy, top_k

Numbers = TypeVar("Numbers", Ints, Int32s, Floats)
FLAT = RunnerLimits(padded=False)
CAPACITY = 64  # positions of the KV cache of the self-check


def why_not_flat(model: BoundModel) -> str:
    """Return why a model is never run in flat steps, whatever its code is; empty if it may be."""
    if any(parameter.device.type != "cpu" for parameter in model.model.parameters()):
        return "it is not on a CPU"
    return model.support.why_not_flat


class FlatRunner(EagerRunner):
    """Runs rows side by side, except for steps that any causal model can run as they are.

    Whether a model can be run this way is checked by the first step that needs it. Until then, and if it cannot, steps
    are padded blocks.
    """

    name = "flat"

    def __init__(self, model: BoundModel) -> None:
        super().__init__(model)
        self._works: bool | None = None  # None: not checked yet
        self._checked = self._state()

    def _state(self) -> tuple[object, ...]:
        return self.model.attention, self.model.fingerprint.structure

    @property
    def limits(self) -> RunnerLimits:
        return FLAT if self._works else super().limits

    def refresh(self, everything: bool = False) -> ModelChange:
        change = super().refresh(everything)
        if self._state() != self._checked:
            self._works, self._checked = None, self._state()
        return change

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        if plan.is_causal:
            return super().launch(plan, cache)
        first = self._works is None
        if self._works is None:
            self._works = not why_not_flat(self.model) and agrees_with_padded(self.model)
        if not self._works:
            return super().launch(plan, cache)
        started = perf_counter()
        with recorded(self.model.model, plan.hidden) as states:
            logits = flat_logits(self.model, plan, cache)
        return FlatStep(plan, logits, perf_counter() - started, is_warm=not first, states=states)


def flat_logits(model: BoundModel, plan: StepPlan, cache: SlotKVCache) -> torch.Tensor:
    """Run a flat step. Returns the logits of the rows that need them, [logit rows of all requests, vocabulary]."""
    cache.apply_moves()
    slots = [cache.slot_of(rows.kv) for rows in plan.requests]
    places = np.concatenate([rows.num_cached + np.arange(len(rows)) for rows in plan.requests])
    writer = FlatWriter(cache.buffers, torch.from_numpy(np.repeat(slots, plan.lengths)), torch.from_numpy(places))
    kinds = list(model.support.kinds.values())
    with (
        model.attending(FlatName(model.attention)),
        model.packed_weights(),
        step_attention(plan, slots, kinds, model.model.dtype) as masks,
    ):
        logits = model.forward_flat(_flat_rows(model, plan, masks), writer, model.model)
    return logits[: len(flat_logit_rows(plan))]


def _flat_rows(model: BoundModel, plan: StepPlan, masks: torch.Tensor) -> FlatRows:
    tokens, positions = flat_tokens(plan), flat_positions(model, plan)
    embeds = flat_embeds(model, tokens, plan) if feeds_embeds(plan) else None
    logit_rows = torch.from_numpy(flat_logit_rows(plan))
    if not len(logit_rows):
        logit_rows = torch.zeros(1, dtype=torch.long)  # a model need not take an empty list
    return FlatRows(tokens, positions, masks, embeds, logit_rows)


def flat_tokens(plan: StepPlan) -> torch.Tensor:
    """Return the tokens of all rows."""
    return torch.from_numpy(np.concatenate([rows.tokens for rows in plan.requests]))


def flat_positions(model: BoundModel, plan: StepPlan) -> torch.Tensor:
    """Return the positions of all rows, as the model counts them."""
    positions = torch.from_numpy(np.concatenate([rows.positions for rows in plan.requests]))
    if model.support.max_positions is not None:
        # Only window rows can point past the last position, and what they compute there is never used.
        positions = positions.clamp(max=model.support.max_positions - 1)
    return positions + torch.from_numpy(np.repeat(plan.position_offsets, plan.lengths))


def flat_embeds(model: BoundModel, tokens: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """Return the embeddings of all rows, [rows, hidden]."""
    return model.embed(tokens, plan, lambda rows: torch.split(rows, plan.lengths))


def flat_logit_rows(plan: StepPlan) -> Ints:
    """Return the rows of a flat step whose logits are needed, ascending."""
    return np.flatnonzero(np.concatenate([rows.needs_logits for rows in plan.requests]))


class FlatStep:
    """The logits of a flat step, [logit rows of all requests, vocabulary]."""

    def __init__(
        self, plan: StepPlan, logits: torch.Tensor, seconds: float, is_warm: bool, states: HiddenStates | None = None
    ) -> None:
        self.plan = plan
        self.all_logits = logits
        self.states = states
        self.seconds = seconds
        self.is_warm = is_warm
        self.logit_rows = flat_logit_rows(plan)
        self.starts = list(accumulate(plan.lengths, initial=0))
        self.num_rows = self.starts[-1]

    def result(self) -> StepResult:
        asked = perf_counter()
        choices, top_ids, top_logits = self.most_likely()
        return StepResult(
            np.array(self.starts[:-1]),
            self._spread(choices, missing=-1),
            self.logits,
            None if top_ids is None else self._spread(top_ids),
            None if top_logits is None else self._spread(top_logits),
            num_rows=self.num_rows,
            seconds=self.seconds + perf_counter() - asked,
            hidden=self.hidden if self.states is not None else None,
            is_warm=self.is_warm,
        )

    def most_likely(self) -> tuple[Ints, Int32s | None, Floats | None]:
        """Return the most likely token of each logit row, and its first few with their logits if they are wanted."""
        wanted = top_k(self.all_logits, self.plan.top_k) if self.plan.top_k else (None, None)
        return greedy(self.all_logits), *wanted

    def logits(self, request: int, rows: Ints) -> torch.Tensor:
        """Return the logits of some rows of a request, [rows, vocabulary]."""
        return self.all_logits[torch.from_numpy(np.searchsorted(self.logit_rows, self.starts[request] + rows))]

    def hidden(self, request: int, rows: Ints) -> torch.Tensor:
        """Return the last hidden states of some rows of a request, [rows, hidden]."""
        assert self.states is not None
        return self.states.calls[0][0, torch.from_numpy(self.starts[request] + rows)]

    def _spread(self, values: Numbers, missing: int = 0) -> Numbers:
        """Place values of the logit rows at their rows."""
        spread = np.full((self.starts[-1], *values.shape[1:]), missing, values.dtype)
        spread[self.logit_rows] = values
        return spread


def agrees_with_padded(model: BoundModel) -> bool:
    """Whether a small flat step gives the logits of the padded one."""
    plan = check_plan(model.vocab_size)
    expected = model.forward(plan, taken_slots(plan.batch, CAPACITY))
    try:
        found = flat_logits(model, plan, taken_slots(plan.batch, CAPACITY))
    except Exception:  # in code of the model that needs other masks, or keys in another shape
        return False
    return agree(found, torch.cat([logits[:count] for logits, count in zip(expected, plan.lengths, strict=True)]))


def check_plan(vocab_size: int) -> StepPlan:
    """Return a step of two requests of different lengths that needs all logits."""
    (longer,) = branched_plan(vocab_size).requests
    pending = longer.pending[:3]
    tree = DraftTree.from_paths([pending.tolist()])
    return StepPlan([longer, RequestPlan(pending, 0, kv=1, predict=len(pending), tree=tree)])
