"""The follower pool: counts after tokens and pairs, their order, and pairs that share a slot."""

from __future__ import annotations

import numpy as np

from lookfar.retrieval.follower_pool import FOLLOWERS, FollowerPool, count_follower, find_followers


def test_followers_are_sorted_by_count_then_recency() -> None:
    row, counts = np.full(FOLLOWERS, -1, np.int32), np.zeros(FOLLOWERS, np.float32)
    for token in (5, 6, 6, 7, 5, 5):
        count_follower(row, counts, token)
    assert row[:4].tolist() == [5, 6, 7, -1]
    assert counts[:4].tolist() == [3, 2, 1, 0]
    for token in range(10, 40):
        count_follower(row, counts, token)
    assert row[:2].tolist() == [5, 6]
    assert row.min() >= 0
    assert 39 in row.tolist()


def test_only_what_was_emitted_is_counted() -> None:
    pool = FollowerPool(50, 64)
    tokens = np.array([[1, 2, 3, 4, 60, -1, 7], [9, 9, 9, 9, 9, 9, 9]], np.int32)
    pool.learn((tokens, np.array([0]), np.array([7])), np.array([5]))
    arrays = pool.arrays
    assert arrays.token_ids[1, 0] == -1
    assert arrays.token_ids[2, 0] == 3
    assert arrays.token_ids[9].max() == -1
    slot = find_followers(arrays.pair_keys, 1, 2)
    assert slot >= 0
    assert arrays.pair_ids[slot, 0] == 3
    assert find_followers(arrays.pair_keys, 2, 1) == -1
    assert find_followers(arrays.pair_keys, -1, 2) == -1


def test_a_pair_replaces_another_in_its_slot() -> None:
    pool = FollowerPool(50, 1)
    tokens = np.array([[1, 2, 3, 4]], np.int32)
    pool.learn((tokens, np.array([0]), np.array([4])), np.array([2]))
    assert find_followers(pool.arrays.pair_keys, 1, 2) == -1
    assert pool.arrays.pair_ids[0].tolist() == [4] + [-1] * (FOLLOWERS - 1)
    assert pool.arrays.pair_counts[0].sum() == 1
