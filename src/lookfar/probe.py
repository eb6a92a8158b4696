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
    tokens = np.random.default_rng(0).integers(0, bound.vocab_size, PROMPT + 2 * BRANCH).tolist()
    prompt, wrong, right = tokens[:PROMPT], tokens[PROMPT : PROMPT + BRANCH], tokens[PROMPT + BRANCH :]
    try:
        branched = _logits(bound, prompt, [wrong, right])[-BRANCH:]
        straight = _logits(bound, prompt, [right])[-BRANCH:]
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return False
    error = (branched - straight).norm(dim=-1) / straight.norm(dim=-1)
    # The median, not the worst: in half precision a router may send a single row to another expert.
    return bool(error.median() < TOLERANCE.get(bound.model.dtype, 0.1))


def _logits(bound: BoundModel, prompt: list[int], branches: list[list[int]]) -> torch.Tensor:
    tree = TokenTree.of(branches)
    plan = Plan([SequencePlan(np.array(prompt), cached=0, tree=tree)])
    cache = SlotCache(slots=1, capacity=len(prompt) + len(tree))
    return bound.forward(plan, cache)[0].float()
