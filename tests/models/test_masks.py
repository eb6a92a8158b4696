"""Masks against their definition: distances are measured between positions, not between indices of keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.models.masks import LayerKind, StepMasks

KV_LENGTH = 6 + 7  # of the longest request: cached tokens and the rows of the step


def make_plan() -> StepPlan:
    tree = DraftTree.from_paths([[5, 6, 7], [8, 9]])
    return StepPlan([RequestPlan(np.array([1, 2]), 6, tree=tree), RequestPlan(np.array([1]), 2)])


@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(window=4), LayerKind(chunk=4)], ids=str)
def test_every_key_of_every_row(kind: LayerKind) -> None:
    plan = make_plan()
    masks = StepMasks(plan, KV_LENGTH, torch.device("cpu"))
    mask = masks.of(kind)
    assert mask.shape == (2, 1, plan.width, KV_LENGTH)
    for i, rows in enumerate(plan.requests):
        for row in range(len(rows)):
            for index in range(KV_LENGTH):
                if index < rows.num_cached:
                    key, seen = index, True
                elif index - rows.num_cached < len(rows):
                    other = index - rows.num_cached
                    key, seen = int(rows.positions[other]), bool(rows.visible[row, other])
                else:
                    key, seen = index, False
                query = int(rows.positions[row])
                if kind.window is not None:
                    seen = seen and query - key < kind.window
                if kind.chunk is not None:
                    seen = seen and query // kind.chunk == key // kind.chunk
                assert bool(mask[i, 0, row, index]) == seen, (i, row, index)


def test_no_row_is_without_a_key() -> None:
    masks = StepMasks(make_plan(), KV_LENGTH, torch.device("cpu"))
    for kind in (LayerKind(), LayerKind(window=1), LayerKind(chunk=1)):
        full = masks.of(kind)[0, 0, :7]
        assert full.any(-1).all()
