"""Trust, but check: small packed steps that say whether a model can be run so."""

from __future__ import annotations

import numpy as np
import torch

from lookfar.cache import SlotCache
from lookfar.gpu.interface import NAME
from lookfar.gpu.packed import PackedStep
from lookfar.model import BoundModel
from lookfar.tree import Plan, SequencePlan, TokenTree

CAPACITY = 64  # of the cache that a model is tried with


def try_out(model: BoundModel, plan: Plan, cache: SlotCache, rows: int = 16) -> torch.Tensor:
    """The logits of a packed step."""
    step = PackedStep(model, cache, rows, 1)
    step.fill(plan)
    step.device.copy_(step.host)
    with model.attending(NAME):
        return step.forward(model.model.forward)[: plan.width]


def keeps_rows_apart(model: BoundModel, rows: int) -> bool:
    """Is a root's answer in a step of so many rows the same to the last bit, whatever is guessed after it?"""
    root, cache = np.array([1 % model.vocab_size]), SlotCache(1, CAPACITY + rows)
    found = []
    for seed in range(3):
        guesses = np.random.default_rng(seed).integers(0, model.vocab_size, (3 * seed, 4)).tolist()
        plan = Plan([SequencePlan(root, cached=0, tree=TokenTree.of(guesses))])
        found.append(try_out(model, plan, cache, rows)[0])
    return all(torch.equal(found[0], other) for other in found)
