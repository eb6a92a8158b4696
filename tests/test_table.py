"""Tables say what masks say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookfar.config import Lookahead
from lookfar.drafters.lookahead import LookaheadDrafter
from lookfar.gpu.table import (
    CELLS,
    DIRECT,
    LOW,
    NEAR,
    PATH,
    POSITIONS,
    SEEN,
    SLOT,
    SLOTS,
    TOKENS,
    WIDTH,
    fill,
    tiles_for,
)
from lookfar.masks import LayerKind, StepMasks
from lookfar.tree import Plan, Riders, SequencePlan, TokenTree

TREE = TokenTree.of([[5, 6, 7], [5, 8], [9]])


def riders() -> Riders:
    drafter = LookaheadDrafter(Lookahead(window=4, ngram=4, guesses=2), list(range(3, 40)))
    return drafter.propose(list(range(3, 40)), 50).riders


@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(window=4), LayerKind(chunk=8)])
def test_a_row_sees_what_its_mask_shows(kind: LayerKind) -> None:
    plans = [
        SequencePlan(np.array([1, 2, 3]), 20, tree=TREE, riders=(riders(),)),
        SequencePlan(np.array([4]), 7),
        SequencePlan(np.array([4]), 9, tree=TREE),
    ]
    plan = Plan(plans, first_slot=2)
    rows = sum(plan.lengths) + 5
    inputs = np.full((4, rows), -9, np.int64)
    tables = np.full((2, rows + tiles_for(rows, 3), WIDTH), -9, np.int32)
    windows = np.array([[kind.window or 0, kind.chunk or 0], [0, 0]], np.int32)
    assert fill(plans, 2, inputs, tables, windows, scratch=99)
    mask = StepMasks(plan, plan.kv_length, torch.device("cpu")).of(kind)[:, 0].numpy()
    row = 0
    for i, rows_of_one in enumerate(plans):
        for r in range(len(rows_of_one)):
            about = tables[0, row]
            keys = np.arange(about[LOW], about[SEEN])
            path = about[PATH + np.maximum(keys - about[DIRECT], 0)]
            assert set(np.where(keys < about[DIRECT], keys, path)) == set(np.flatnonzero(mask[i, r]))
            assert about[SLOT] == inputs[SLOTS, row] == 2 + i
            assert inputs[CELLS, row] == rows_of_one.cached + r
            row += 1
        part = slice(row - len(rows_of_one), row)
        assert inputs[TOKENS, part].tolist() == rows_of_one.tokens.tolist()
        assert inputs[POSITIONS, part].tolist() == rows_of_one.positions.tolist()
    assert (inputs[CELLS, row:] == 99).all()
    assert not tables[:, row : len(inputs[0]), SEEN].any()


def test_tiles_hold_every_row_once_and_rows_of_one_sequence_only() -> None:
    plans = [SequencePlan(np.arange(37), 0), SequencePlan(np.array([4]), 9, tree=TREE)]
    rows = 64
    inputs, tables = np.zeros((4, rows), np.int64), np.zeros((1, rows + tiles_for(rows, 2), WIDTH), np.int32)
    assert fill(plans, 0, inputs, tables, np.zeros((1, 2), np.int32), 99)
    tiles = [(first, count, slot) for first, count, slot in tables[0, rows:, :3].tolist() if count]
    assert tiles == [(0, 16, 0), (16, 16, 0), (32, 5, 0), (37, 6, 1)]
    assert tables[0, rows : rows + 4, 3].tolist() == [16, 32, 37, 13]  # the most that one of its rows sees


def test_what_cannot_be_told_by_paths() -> None:
    rows = 64
    inputs, tables = np.zeros((4, rows), np.int64), np.zeros((1, rows + tiles_for(rows, 1), WIDTH), np.int32)

    def told(plan: SequencePlan) -> bool:
        return fill([plan], 0, inputs, tables, np.zeros((1, 2), np.int32), 99)

    root = np.array([1])
    assert told(SequencePlan(root, 5, tree=TokenTree.of([list(range(NEAR))])))
    assert not told(SequencePlan(root, 5, tree=TokenTree.of([list(range(NEAR + 1))])))
    blind = Riders(np.array([1, 2]), np.array([1, 2]), np.eye(2, dtype=bool), np.ones(2, bool))  # misses a position
    assert not told(SequencePlan(root, 5, riders=(blind,)))
