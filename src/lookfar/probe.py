"""Trust, but check: does a model verify a tree exactly? For code that is not part of transformers itself."""

from __future__ import annotations

import numpy as np
import torch

from lookfar.cache import SlotCache
from lookfar.model import BoundModel
from lookfar.tree import Plan, SequencePlan, TokenTree

PROMPT, BRANCH = 6, 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # anything coarser: 0.1


def verifies_trees(bound: BoundModel) -> bool:
    """Compare the logits along a branch that lies behind a wrong one with those of the same tokens alone."""
    try:
        branched, straight = (
            _logits(bound, branched_plan(bound.vocab_size, wrong))[-BRANCH:] for wrong in (True, False)
        )
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return False
    return agree(branched, straight)


def branched_plan(vocab_size: int, wrong: bool = True) -> Plan:
    """A short prompt and a branch, behind a wrong one if asked for."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, PROMPT + 2 * BRANCH).tolist()
    prompt, branches = tokens[:PROMPT], [tokens[PROMPT : PROMPT + BRANCH], tokens[PROMPT + BRANCH :]]
    tree = TokenTree.of(branches if wrong else branches[1:])
    return Plan([SequencePlan(np.array(prompt), cached=0, learned=PROMPT, tree=tree)])


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are these the same logits, but for rounding?"""
    error = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
    # The median, not the worst: in half precision a router may send a single row to another expert.
    return bool(error.median() < TOLERANCE.get(other.dtype, 0.1))


def _logits(bound: BoundModel, plan: Plan) -> torch.Tensor:
    return bound.forward(plan, SlotCache(slots=1, capacity=plan.width))[0]
