"""The recycle table: the last prediction counts, pairs beside tokens, in memory that does not grow."""

from __future__ import annotations

import numpy as np

from lookfar.core.decode_plan import DecodePlan, DecodingRequests, LastTokens
from lookfar.core.host_team import HostTeam
from lookfar.core.plan import RequestPlan
from lookfar.core.tree import DraftTree, DraftTrees
from lookfar.retrieval.recycle_table import (
    TOP_K,
    RecycleTable,
    RunnerUps,
    find_pair,
    find_triple,
    learn_rows,
    pair_slot,
    store_prediction,
)


def learn(table: RecycleTable, before: int, token: int, first: int) -> None:
    top = np.arange(first, first + TOP_K, dtype=np.int32)[None]
    logits = np.linspace(5, 0, TOP_K, dtype=np.float32)[None]
    table.learn(np.array([before], np.int32), np.array([token], np.int32), top, logits)


def predicted_after(table: RecycleTable, before: int, token: int) -> int | None:
    """The most likely token after a pair, if the table holds it."""
    slot = find_pair(table.arrays.pair_keys, before, token)
    return int(table.arrays.pair_ids[slot, 0]) if slot >= 0 else None


def test_the_last_prediction_counts() -> None:
    table = RecycleTable(100, 1 << 10)
    learn(table, 3, 7, 10)
    learn(table, 4, 7, 20)
    assert table.arrays.token_ids[7, 0] == 20
    assert pair_slot(3, 7, 1 << 10) != pair_slot(4, 7, 1 << 10)
    assert predicted_after(table, 3, 7) == 10
    assert predicted_after(table, 4, 7) == 20
    assert predicted_after(table, 7, 3) is None
    learn(table, 3, 7, 30)
    assert predicted_after(table, 3, 7) == 30
    assert (table.arrays.token_ids[8] == -1).all()


def test_a_pair_replaces_another_one_in_its_slot_and_is_not_taken_for_it() -> None:
    table = RecycleTable(100, 1)
    learn(table, 3, 7, 10)
    learn(table, 4, 8, 20)
    assert predicted_after(table, 4, 8) == 20
    assert predicted_after(table, 3, 7) is None


def test_memory_is_fixed_and_pairs_are_spread_over_the_slots() -> None:
    table = RecycleTable(1000, 1 << 10)
    size = table.nbytes
    rng = np.random.default_rng(0)
    for _ in range(2000):
        learn(table, int(rng.integers(1000)), int(rng.integers(1000)), 5)
    assert table.nbytes == size
    assert (table.arrays.pair_keys >= 0).sum() > 800


def test_a_vocabulary_smaller_than_a_row_of_the_table() -> None:
    assert RecycleTable(5, 4).arrays.token_ids.shape == (5, 5)


def test_triples_are_told_apart() -> None:
    table = RecycleTable(100, 1 << 10)
    top, logits = np.arange(TOP_K, dtype=np.int32)[None], np.linspace(5, 0, TOP_K, dtype=np.float32)[None]
    for first in range(5):
        store_prediction(tuple(table.arrays), (first, 8, 9), (top + first, logits), 0, (0, 1, 1))
    store_prediction(tuple(table.arrays), (-1, 8, 9), (top + 50, logits), 0, (0, 1, 1))  # the text begins with the pair
    for first in range(5):
        slot = find_triple(table.arrays.triple_keys, first, 8, 9)
        assert table.arrays.triple_ids[slot, 0] == first
    assert find_triple(table.arrays.triple_keys, 5, 8, 9) == -1
    assert find_triple(table.arrays.triple_keys, -1, 8, 9) == -1
    assert predicted_after(table, 8, 9) == 50


def test_a_step_teaches_the_same_in_any_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    team = HostTeam(3)
    tables = [RecycleTable(90, 64) for _ in range(3)]  # small, so that rows collide
    ups = [[RunnerUps() for _ in range(11)] for _ in tables]
    requests = DecodingRequests([RequestPlan(np.zeros(1, np.int64), 5, kv, predict=kv % 2) for kv in range(11)])
    for _ in range(5):
        trees = [DraftTree.from_paths(rng.integers(0, 90, (kv % 4, 3)).tolist()) for kv in range(11)]
        plan = DecodePlan(requests, LastTokens(rng.integers(0, 90, 11), np.full(11, 5)), DraftTrees.of(trees))
        starts = np.cumsum([0, *plan.lengths[:-1]])
        last = [start + int(rng.integers(0, length)) for start, length in zip(starts, plan.lengths, strict=True)]
        columns = [np.arange(11), starts, last, *rng.integers(-1, 90, (3, 11))]
        about = np.array(columns, np.int64).T.copy()
        top = np.argsort(rng.random((sum(plan.lengths), 90)), 1)[:, :8].astype(np.int32)
        logits = -np.sort(-rng.normal(3, 2, top.shape), 1).astype(np.float32)
        for table, own, parts in zip(tables, ups, (1, 3, 4), strict=True):
            addresses = np.array([one.address for one in own])
            learn_rows(tuple(table.arrays), tuple(plan.flat), about, (top, logits), addresses, (team.address, parts))
    team.close()
    for table, own in zip(tables[1:], ups[1:], strict=True):
        for array, expected in zip(table.arrays, tables[0].arrays, strict=True):
            assert np.array_equal(array, expected)
        for one, alone in zip(own, ups[0], strict=True):
            assert np.array_equal(one.tokens, alone.tokens)
            assert np.array_equal(one.off_path, alone.off_path)
