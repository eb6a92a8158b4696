"""Self-checks of model code: a tree step, or a step from a recurrent state, against the same tokens alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kvcache.recurrent import RecurrentKVCache
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel

PROMPT, BRANCH = 6, 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # anything coarser: 0.1


def why_not_verified(bound: BoundModel) -> str:
    """Return why a model's code cannot verify drafts as its `support` says; empty if it can.

    Trees are checked for code outside of transformers, chains for all: kernels of other libraries may take part.
    """
    stock = type(bound.model).__module__.startswith("transformers.")
    if bound.support.trees and not stock and not verifies_trees(bound):
        return "its code does not follow the mask, positions and cache it is given"
    if bound.support.mode == "chain" and not verifies_chains(bound):
        return "its code computes something else for several tokens at once than for single ones"
    return ""


def verifies_chains(bound: BoundModel) -> bool:
    """Compare the logits of several tokens after a prompt with those of the same tokens one by one."""
    steps = [[PROMPT, *[1] * BRANCH], [PROMPT, BRANCH]]
    if not bound.support.recurrent:
        steps.append([PROMPT + BRANCH])  # a prompt together with drafts
    try:
        alone, *others = (_chain_logits(bound, lengths)[PROMPT:] for lengths in steps)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return False
    return all(agree(found, alone, slack=10) for found in others)  # other kernels, some of them in float32


def _chain_logits(bound: BoundModel, lengths: Seq[int]) -> torch.Tensor:
    """Return the logits of a text that is fed in steps of some lengths."""
    tokens = np.random.default_rng(0).integers(0, bound.vocab_size, sum(lengths))
    cache = RecurrentKVCache(bound.model.config) if bound.support.recurrent else SlotKVCache()
    cache.reserve(1, len(tokens), most=1, keep=False)
    handle, cached = cache.allocate()
    found = []
    for length in lengths:
        plan = StepPlan([RequestPlan(tokens[cached : cached + length], cached, handle, predict=length)])
        plan.prefills = not cached
        found.append(bound.forward(plan, cache)[0])
        cached = cache.commit(handle, length)
    return torch.cat(found)


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


def agree(one: torch.Tensor, other: torch.Tensor, slack: int = 1) -> bool:
    """Whether two sets of logits are equal but for rounding."""
    error = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
    # The median, not the worst: in half precision a router may send a single row to another expert.
    return bool(error.median() < slack * TOLERANCE.get(other.dtype, 0.1 / slack))


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
