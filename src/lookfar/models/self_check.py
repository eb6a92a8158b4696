"""Self-check of model code outside of transformers: compares a tree step with the same tokens alone."""

from __future__ import annotations

import numpy as np
import torch

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel

PROMPT, BRANCH = 6, 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # anything coarser: 0.1


def verifies_trees(bound: BoundModel) -> bool:
    """Compare the logits along a branch behind a wrong branch with the logits of the same tokens alone."""
    try:
        branched, straight = (
            _logits(bound, branched_plan(bound.vocab_size, wrong))[-BRANCH:] for wrong in (True, False)
        )
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return False
    return agree(branched, straight)


def branched_plan(vocab_size: int, wrong: bool = True) -> StepPlan:
    """Return a step with a short prompt and a branch, by default behind a wrong branch."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, PROMPT + 2 * BRANCH).tolist()
    prompt, branches = tokens[:PROMPT], [tokens[PROMPT : PROMPT + BRANCH], tokens[PROMPT + BRANCH :]]
    tree = DraftTree.from_paths(branches if wrong else branches[1:])
    return StepPlan([RequestPlan(np.array(prompt), num_cached=0, predict=PROMPT, tree=tree)])


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two sets of logits are equal but for rounding."""
    error = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
    # The median, not the worst: in half precision a router may send a single row to another expert.
    return bool(error.median() < TOLERANCE.get(other.dtype, 0.1))


def one_slot(capacity: int) -> SlotKVCache:
    """Return a KV cache of one slot whose request has the handle 0."""
    return taken_slots(1, capacity)


def taken_slots(count: int, capacity: int) -> SlotKVCache:
    """Return a KV cache whose slots belong to requests with the handles 0, 1, …"""
    cache = SlotKVCache(count, capacity)
    for _ in range(count):
        cache.allocate()
    return cache


def _logits(bound: BoundModel, plan: StepPlan) -> torch.Tensor:
    return bound.forward(plan, one_slot(plan.width))[0]
