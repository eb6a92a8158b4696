"""Recycled predictions: the last ones count, pairs beside tokens, in memory that does not grow."""

from __future__ import annotations

import numpy as np

from lookfar.successors import TOP, Successors, pair_slot


def learn(successors: Successors, before: int, token: int, first: int) -> None:
    top = np.arange(first, first + TOP, dtype=np.int32)[None]
    logits = np.linspace(5, 0, TOP, dtype=np.float32)[None]
    successors.learn(np.array([before], np.int32), np.array([token], np.int32), top, logits)


def test_the_last_prediction_counts() -> None:
    successors = Successors(100, 16)
    learn(successors, 3, 7, 10)
    learn(successors, 4, 7, 20)
    assert successors.tables.token_ids[7, 0] == 20
    for before, first in ((3, 10), (4, 20)):
        slot = pair_slot(before, 7, 16)
        if pair_slot(3, 7, 16) != pair_slot(4, 7, 16):
            assert successors.tables.pair_ids[slot, 0] == first
    assert (successors.tables.token_ids[8] == -1).all()


def test_a_pair_that_falls_on_a_taken_slot_replaces_it() -> None:
    successors = Successors(100, 1)
    learn(successors, 3, 7, 10)
    learn(successors, 4, 8, 20)
    assert successors.tables.pair_keys[0] == (4 << 32) | 8
    assert successors.tables.pair_ids[0, 0] == 20


def test_memory_is_fixed_and_slots_are_spread() -> None:
    successors = Successors(1000, 1 << 10)
    size = successors.nbytes
    rng = np.random.default_rng(0)
    for _ in range(2000):
        learn(successors, int(rng.integers(1000)), int(rng.integers(1000)), 5)
    assert successors.nbytes == size
    assert (successors.tables.pair_keys >= 0).sum() > 800


def test_a_vocabulary_smaller_than_the_table() -> None:
    successors = Successors(5, 4)
    assert successors.tables.token_ids.shape == (5, 5)
