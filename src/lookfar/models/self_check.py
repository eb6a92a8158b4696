"""Self-checks of model code: a tree step, or a step from a recurrent state, against the same tokens alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from transformers import Cache

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.errors import FirstPassError
from lookfar.kvcache.recurrent import RecurrentKVCache
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.models.first_forward import FirstForward, PrefilledRow

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


def check_continuation(bound: BoundModel, call: FirstForward, cache: Cache, rows: Seq[PrefilledRow]) -> None:
    """Compare one more token after a first pass with transformers' own decoding step, once for each model.

    A model may need more of an image in every step than its KV. Raises a `FirstPassError`; later prompts of the kind
    are left to transformers.
    """
    try:
        same = _continues_alike(bound, call, cache, rows)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        same = False
    if not same:
        bound.first_pass_refused = "it decodes with more than the KV of such a prompt"
        raise FirstPassError(
            f"{bound.support.model_type} decodes with more than the KV of this prompt: send it again, "
            "and transformers decodes it."
        )
    bound.first_pass_checked = True


def _continues_alike(bound: BoundModel, call: FirstForward, cache: Cache, rows: Seq[PrefilledRow]) -> bool:
    tokens = torch.stack([row.logits for row in rows]).argmax(-1)
    slots = RecurrentKVCache(bound.model.config) if bound.support.recurrent else SlotKVCache()
    slots.reserve(len(rows), call.input_ids.shape[1] + 1, most=len(rows), keep=False)
    plans = []
    for row, token in zip(rows, tokens.tolist(), strict=True):
        handle, _ = slots.allocate()
        cached, offset = slots.import_kv(handle, row.kv), row.position_offset
        plans.append(RequestPlan(np.array([token]), cached, handle, position_offset=offset, source=row.source))
    ours = bound.forward(StepPlan(plans), slots)[:, -1]
    return agree(ours, call.decode(cache, tokens[:, None]), slack=10)


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
