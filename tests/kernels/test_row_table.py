"""Row tables describe what masks show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lookfar.core.plan import RequestPlan, StepPlan, WindowRows
from lookfar.core.tree import DraftTree
from lookfar.drafters.lookahead import Lookahead, LookaheadDrafter
from lookfar.kernels.row_table import (
    KV_LEN,
    KV_POSITIONS,
    MAX_PATH,
    POSITIONS,
    PREFIX_LEN,
    SLOT,
    SLOTS,
    TOKENS,
    TREE_PATH,
    WIDTH,
    WINDOW_START,
    RowTable,
    max_tiles,
    step_arrays,
)
from lookfar.models.masks import LayerKind, StepMasks

TREE = DraftTree.from_paths([[5, 6, 7], [5, 8], [9]])
SPARE = 99


def window() -> WindowRows:
    drafter = LookaheadDrafter(Lookahead(window=4, ngram=4, guesses=2), list(range(3, 40)))
    return drafter.propose(list(range(3, 40)), 50).window


def empty_table(rows: int, batch: int, kind: LayerKind = LayerKind()) -> RowTable:  # noqa: B008
    """A table for two kinds of layers, the second with full attention, filled with rubbish."""
    inputs = np.full((4, rows), -9, np.int64)
    tables = np.full((2, rows + max_tiles(rows, batch), WIDTH), -9, np.int32)
    return RowTable(step_arrays(inputs, tables, [(kind.window or 0, kind.chunk or 0), (0, 0)]), SPARE)


@pytest.mark.parametrize("kind", [LayerKind(), LayerKind(window=4), LayerKind(chunk=8)])
def test_a_row_sees_what_its_mask_shows(kind: LayerKind) -> None:
    plans = [
        RequestPlan(np.array([1, 2, 3]), 20, tree=TREE, windows=(window(),)),
        RequestPlan(np.array([4]), 7),
        RequestPlan(np.array([4]), 9, tree=TREE),
    ]
    plan = StepPlan(plans)
    table = empty_table(sum(plan.lengths) + 5, 3, kind)
    assert table.fill(StepPlan(plans), [2, 3, 4])
    inputs, tables, _ = table.arrays
    kv_length = int(plan.num_cached.max()) + plan.width
    mask = StepMasks(plan, kv_length, torch.device("cpu")).of(kind)[:, 0].numpy()
    row = 0
    for i, rows in enumerate(plans):
        for r in range(len(rows)):
            entry = tables[0, row]
            keys = np.arange(entry[WINDOW_START], entry[KV_LEN])
            path = entry[TREE_PATH + np.maximum(keys - entry[PREFIX_LEN], 0)]
            assert set(np.where(keys < entry[PREFIX_LEN], keys, path)) == set(np.flatnonzero(mask[i, r]))
            assert entry[SLOT] == inputs[SLOTS, row] == 2 + i
            assert inputs[KV_POSITIONS, row] == rows.num_cached + r
            row += 1
        part = slice(row - len(rows), row)
        assert inputs[TOKENS, part].tolist() == rows.tokens.tolist()
        assert inputs[POSITIONS, part].tolist() == rows.positions.tolist()
    assert (inputs[KV_POSITIONS, row:] == SPARE).all()
    assert not tables[:, row : len(inputs[0]), KV_LEN].any()


def test_tiles_hold_every_row_once_and_rows_of_one_request_only() -> None:
    plans = [RequestPlan(np.arange(37), 0), RequestPlan(np.array([4]), 9, tree=TREE)]
    rows = 64
    table = empty_table(rows, 2)
    assert table.fill(StepPlan(plans), [0, 1])
    tables = table.arrays.tables
    tiles = [(first, count, slot) for first, count, slot in tables[0, rows:, :3].tolist() if count > 0]
    assert tiles == [(0, 16, 0), (16, 16, 0), (32, 5, 0), (37, 6, 1)]
    assert tables[0, rows : rows + 4, 3].tolist() == [16, 32, 37, 13]  # the most keys that one of its rows sees


def test_what_a_path_cannot_describe() -> None:
    def described(plan: RequestPlan) -> bool:
        return empty_table(64, 1).fill(StepPlan([plan]), [0])

    last = np.array([1])
    assert described(RequestPlan(last, 5, tree=DraftTree.from_paths([list(range(MAX_PATH))])))
    assert not described(RequestPlan(last, 5, tree=DraftTree.from_paths([list(range(MAX_PATH + 1))])))
    gap = WindowRows(np.array([1, 2]), np.array([1, 2]), np.eye(2, dtype=bool), np.ones(2, bool))  # misses a position
    assert not described(RequestPlan(last, 5, windows=(gap,)))
