"""The recycle table: what the model last predicted after each token and after each pair of tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit

TOP_K = 8  # predictions kept for each token and pair
SAMPLED_TOP_K = 24  # the same for sampled texts, where the sampling noise says which of them to draft


class RecycleArrays(NamedTuple):
    """The arrays of a recycle table. Compiled code takes them as a plain tuple, which numba unpacks faster."""

    token_ids: Int32s  # [vocabulary, k] most likely first, -1 behind the last one
    token_logits: Floats
    pair_keys: Ints  # [pairs] the pair that a slot holds, -1 for none; a power of two of them
    pair_ids: Int32s  # [pairs, k]
    pair_logits: Floats


class RecycleTable:
    """Predictions after every token of the vocabulary, and after `pairs` pairs; a new pair replaces a colliding one."""

    def __init__(self, vocab_size: int, pairs: int) -> None:
        k = min(SAMPLED_TOP_K, vocab_size)
        self.arrays = RecycleArrays(
            np.full((vocab_size, k), -1, np.int32),
            np.zeros((vocab_size, k), np.float32),
            np.full(pairs, -1, np.int64),
            np.full((pairs, k), -1, np.int32),
            np.zeros((pairs, k), np.float32),
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def learn(self, before: Int32s, tokens: Int32s, top_ids: Int32s, top_logits: Floats) -> None:
        """Store that the model predicted `top_ids[i]`, most likely first, after `tokens[i]`.

        `before[i]` is the token before `tokens[i]`, or -1.
        """
        store_predictions(tuple(self.arrays), before, tokens, top_ids, top_logits)


NO_RECYCLING = RecycleTable(0, 0)


@jit
def pair_slot(before, token, slots):  # type: ignore[no-untyped-def]
    mixed = np.uint64(before) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed >> np.uint64(29)) & np.uint64(slots - 1))


@jit
def find_pair(keys, before, last):  # type: ignore[no-untyped-def]
    """Return the slot of a pair of tokens, or -1 if the table does not hold it."""
    if before < 0 or not len(keys):
        return -1
    slot = pair_slot(before, last, len(keys))
    return slot if keys[slot] == (np.int64(before) << 32) | last else -1


@jit
def store_predictions(arrays, before, tokens, top_ids, top_logits):  # type: ignore[no-untyped-def]
    """Fill the rows of tokens and pairs; -1 ends a row, and what lies behind it is never read."""
    token_ids, token_logits, pair_keys, pair_ids, pair_logits = arrays
    k = top_ids.shape[1]
    full = k == token_ids.shape[1]
    for i in range(len(tokens)):
        token = tokens[i]
        if token < 0 or token >= len(token_ids):
            continue
        for j in range(k):
            token_ids[token, j], token_logits[token, j] = top_ids[i, j], top_logits[i, j]
        if not full:
            token_ids[token, k] = -1
        if before[i] >= 0:
            slot = pair_slot(before[i], token, len(pair_keys))
            pair_keys[slot] = (np.int64(before[i]) << 32) | token
            for j in range(k):
                pair_ids[slot, j], pair_logits[slot, j] = top_ids[i, j], top_logits[i, j]
            if not full:
                pair_ids[slot, k] = -1
