"""Self-checks of the CUDA graph runner: small flat steps that show whether a model can be run this way."""

from __future__ import annotations

import numpy as np
import torch

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kernels.attention_op import NAME
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import one_slot
from lookfar.runners.cuda_graph.flat_step import FlatStep

CAPACITY = 64  # positions of the KV cache of a check


def run_flat(model: BoundModel, plan: StepPlan, cache: SlotKVCache, rows: int = 16) -> torch.Tensor:
    """Return the logits of a flat step."""
    step = FlatStep(model, cache, rows, 1)
    step.fill(plan)
    step.device.copy_(step.host)
    with model.attending(NAME):
        return step.forward(model.model.forward)[: plan.width]


def rows_are_independent(model: BoundModel, rows: int) -> bool:
    """Whether the logits after the last token are bit-for-bit the same, whatever draft tokens follow it."""
    last, cache = np.array([1 % model.vocab_size]), one_slot(CAPACITY + rows)
    found = []
    for seed in range(3):
        drafts = np.random.default_rng(seed).integers(0, model.vocab_size, (3 * seed, 4)).tolist()
        plan = StepPlan([RequestPlan(last, num_cached=0, tree=DraftTree.from_paths(drafts))])
        found.append(run_flat(model, plan, cache, rows)[0])
    return all(torch.equal(found[0], other) for other in found)
