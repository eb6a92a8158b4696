"""Self-checks of model code: a tree step, or a step from a recurrent state, against the same tokens alone."""

from __future__ import annotations

import numpy as np
import torch

from lookfar.core.arrays import Ints
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kvcache.recurrent import RecurrentKVCache
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel

PROMPT, BRANCH = 6, 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # anything coarser: 0.1


def why_not_verified(bound: BoundModel) -> str:
    """Return why a model's code cannot verify drafts as its `support` says; empty if it can.

    Trees are checked for code outside of transformers, recurrent states for all: kernels of other libraries may take
    part.
    """
    stock = type(bound.model).__module__.startswith("transformers.")
    if bound.support.trees and not stock and not verifies_trees(bound):
        return "its code does not follow the mask, positions and cache it is given"
    if bound.support.recurrent and not verifies_chains(bound):
        return "its code does not continue from a recurrent state with several tokens as with single ones"
    if bound.support.mode == "chain" and not bound.support.recurrent and not stock:
        return bound.support.reason
    return ""


def verifies_chains(bound: BoundModel) -> bool:
    """Compare the logits of several tokens after a prompt with those of the same tokens one by one."""
    tokens = np.random.default_rng(0).integers(0, bound.vocab_size, PROMPT + BRANCH)
    try:
        at_once, alone = (_continued(bound, tokens, rows) for rows in (BRANCH, 1))
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return False
    return agree(at_once, alone)


def _continued(bound: BoundModel, tokens: Ints, rows: int) -> torch.Tensor:
    """Return the logits after a prompt, `rows` tokens in each step."""
    cache = RecurrentKVCache(bound.model.config)
    cache.reserve(1, len(tokens), most=1, keep=False)
    handle, cached = cache.allocate()
    found = []
    for end in range(PROMPT, len(tokens) + 1, rows):
        fed = tokens[cached:end]
        plan = StepPlan([RequestPlan(fed, cached, handle, predict=len(fed))])
        plan.prefills = not cached
        logits = bound.forward(plan, cache)[0]
        cached = cache.commit(handle, len(fed))
        found.append(logits)
    return torch.cat(found[1:])


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
