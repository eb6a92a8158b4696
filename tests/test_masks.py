"""Masks against the sentence they implement: distances are between positions, not between cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookfar.masks import LayerKind, StepMasks
from lookfar.tree import Plan, SequencePlan, TokenTree


def make_plan() -> Plan:
    tree = TokenTree.of([[5, 6, 7], [8, 9]])
    return Plan([SequencePlan(np.array([1, 2]), 6, tree=tree), SequencePlan(np.array([1]), 2)])


@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(window=4), LayerKind(chunk=4)], ids=str)
def test_every_cell_of_every_row(kind: LayerKind) -> None:
    plan = make_plan()
    masks = StepMasks(plan, plan.kv_length, torch.device("cpu"))
    mask = masks.of(kind)
    assert mask.shape == (2, 1, plan.width, plan.kv_length)
    for i, rows in enumerate(plan.sequences):
        for row in range(len(rows)):
            for cell in range(plan.kv_length):
                if cell < rows.cached:
                    key, seen = cell, True
                elif cell - rows.cached < len(rows):
                    key, seen = int(rows.positions[cell - rows.cached]), bool(rows.visible[row, cell - rows.cached])
                else:
                    key, seen = cell, False
                query = int(rows.positions[row])
                if kind.window is not None:
                    seen = seen and query - key < kind.window
                if kind.chunk is not None:
                    seen = seen and query // kind.chunk == key // kind.chunk
                assert bool(mask[i, 0, row, cell]) == seen, (i, row, cell)


def test_no_row_is_without_a_key() -> None:
    masks = StepMasks(make_plan(), make_plan().kv_length, torch.device("cpu"))
    for kind in (LayerKind(), LayerKind(window=1), LayerKind(chunk=1)):
        full = masks.of(kind)[0, 0, :7]
        assert full.any(-1).all()
