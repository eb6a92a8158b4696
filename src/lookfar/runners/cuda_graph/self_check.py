"""Self-checks of the CUDA graph runner: small flat steps that show whether a model can be run this way."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kernels.attention_op import NAME
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import one_slot
from lookfar.runners.cuda_graph.flat_step import FlatStep
from lookfar.runners.cuda_graph.graph_step import GraphStep, LayerOptions

CAPACITY = 64  # positions of the KV cache of a check
TEXT = 2  # tokens of the text whose bits are compared


def run_flat(model: BoundModel, plan: StepPlan, cache: SlotKVCache) -> torch.Tensor:
    """Return the logits of a flat step."""
    step = FlatStep(model, cache, 16, 1)
    step.fill(plan)
    step.device.copy_(step.host)
    with model.attending(NAME):
        return step.forward(model.model.forward)[: plan.width]


def rows_are_independent(model: BoundModel, layers: LayerOptions, sizes: Seq[int]) -> bool:
    """Whether a text has the same logits, bit for bit, in steps of several sizes, filled up with random drafts."""
    rng, vocab_size = np.random.default_rng(0), model.vocab_size
    text = rng.integers(0, vocab_size, TEXT)
    cache = one_slot(TEXT + max(sizes))
    expected: torch.Tensor | None = None
    for size in sizes:
        found = []
        for start in range(0, TEXT, size):
            pending = text[start : start + size]
            drafts = rng.integers(0, vocab_size, (size - len(pending), 1)).tolist()
            plan = StepPlan([RequestPlan(pending, num_cached=start, tree=DraftTree.from_paths(drafts))])
            step = GraphStep(model, cache, size, 1, layers)
            step.fill(plan)
            step.device.copy_(step.host)
            found.append(step.run()[: len(pending)].clone())
        logits = torch.cat(found)
        if expected is not None and not torch.equal(logits, expected):
            return False
        expected = logits
    return True
