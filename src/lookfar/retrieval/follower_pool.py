"""The follower pool: counts of the tokens that followed each token and pair of tokens in the output of any request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.retrieval.recycle_table import pair_slot

FOLLOWERS = 8  # that are kept for each token and pair


class FollowerArrays(NamedTuple):
    """The arrays of a pool. Compiled code takes them as a plain tuple, which numba unpacks faster."""

    token_ids: Int32s  # [vocabulary, FOLLOWERS] most frequent first, then latest; -1 behind the last one
    token_counts: Floats
    pair_keys: Ints  # [pairs] the pair that a slot holds, -1 for none; a power of two of them
    pair_ids: Int32s  # [pairs, FOLLOWERS]
    pair_counts: Floats


class FollowerPool:
    """Followers of every token of the vocabulary, and of `pairs` pairs; a new pair replaces a colliding one."""

    def __init__(self, vocab_size: int, pairs: int) -> None:
        self.arrays = FollowerArrays(
            np.full((vocab_size, FOLLOWERS), -1, np.int32),
            np.zeros((vocab_size, FOLLOWERS), np.float32),
            np.full(pairs, -1, np.int64),
            np.full((pairs, FOLLOWERS), -1, np.int32),
            np.zeros((pairs, FOLLOWERS), np.float32),
        )

    def learn(self, rows: tuple[Int32s, Ints, Ints], counts: Ints) -> None:
        """Count the last `counts[i]` tokens of several texts: `tokens[places[i], : sizes[i]]` of the rows."""
        learn_followers(tuple(self.arrays), rows, counts)


@jit
def find_followers(keys, before, last):  # type: ignore[no-untyped-def]
    """Return the slot of a pair of tokens, or -1 if the pool does not hold it."""
    if before < 0 or last < 0 or not len(keys):
        return np.int64(-1)
    slot = pair_slot(before, last, len(keys))
    return slot if keys[slot] == (np.int64(before) << 32) | last else np.int64(-1)


@jit
def learn_followers(arrays, rows, counts):  # type: ignore[no-untyped-def]
    """Count the last tokens of several texts as followers of the token and of the pair before them."""
    token_ids, token_counts, pair_keys, pair_ids, pair_counts = arrays
    tokens, places, sizes = rows
    for i in range(len(places)):
        text = tokens[places[i]]
        for place in range(max(sizes[i] - counts[i], 1), sizes[i]):
            token, follower = text[place - 1], text[place]
            if follower < 0 or not 0 <= token < len(token_ids):
                continue
            count_follower(token_ids[token], token_counts[token], follower)
            if place > 1 and text[place - 2] >= 0:
                key = (np.int64(text[place - 2]) << 32) | token
                slot = pair_slot(text[place - 2], token, len(pair_keys))
                if pair_keys[slot] != key:
                    pair_keys[slot] = key
                    pair_ids[slot] = -1
                    pair_counts[slot] = 0
                count_follower(pair_ids[slot], pair_counts[slot], follower)


@jit
def count_follower(ids, counts, follower):  # type: ignore[no-untyped-def]
    """Count a follower: the most frequent come first, then the latest. In a full row a new one replaces the last."""
    place, last = 0, len(ids) - 1
    while place < last and ids[place] >= 0 and ids[place] != follower:
        place += 1
    count = counts[place] + np.float32(1.0) if ids[place] == follower else np.float32(1.0)
    while place > 0 and counts[place - 1] <= count:
        ids[place], counts[place] = ids[place - 1], counts[place - 1]
        place -= 1
    ids[place], counts[place] = follower, count
