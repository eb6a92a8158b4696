"""What the model last predicted after each token and after each pair of tokens, in fixed memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookfar.arrays import Floats, Int32s, Ints
from lookfar.jit import jit

TOP = 8  # predictions kept for each token and pair
SAMPLED_TOP = 24  # the same for sampled texts, where the noise says which of them to guess


class Tables(NamedTuple):
    """The arrays behind `Successors`, as compiled code takes them."""

    token_ids: Int32s  # [vocabulary, top] best first, -1 behind the last one
    token_logits: Floats
    pair_keys: Ints  # [pairs] which pair a slot holds, -1 for none; a power of two of them
    pair_ids: Int32s  # [pairs, top]
    pair_logits: Floats


class Successors:
    """For every token of the vocabulary, and for `pairs` pairs (a newer pair replaces one that falls on its slot)."""

    def __init__(self, vocab_size: int, pairs: int) -> None:
        top = min(SAMPLED_TOP, vocab_size)
        self.tables = Tables(
            np.full((vocab_size, top), -1, np.int32),
            np.zeros((vocab_size, top), np.float32),
            np.full(pairs, -1, np.int64),
            np.full((pairs, top), -1, np.int32),
            np.zeros((pairs, top), np.float32),
        )

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def learn(self, before: Int32s, tokens: Int32s, top_ids: Int32s, top_logits: Floats) -> None:
        """Rows with token `tokens[i]` behind `before[i]` (-1: nothing) predicted `top_ids[i]`, best first."""
        remember(self.tables, before, tokens, top_ids, top_logits)


NO_SUCCESSORS = Successors(0, 0)


@jit
def pair_slot(before, token, slots):  # type: ignore[no-untyped-def]
    mixed = np.uint64(before) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed >> np.uint64(29)) & np.uint64(slots - 1))


@jit
def remember(tables, before, tokens, top_ids, top_logits):  # type: ignore[no-untyped-def]
    """Fill the rows of tokens and pairs; -1 ends one, and what is behind that is never read."""
    token_ids, token_logits, pair_keys, pair_ids, pair_logits = tables
    top = top_ids.shape[1]
    full = top == token_ids.shape[1]
    for i in range(len(tokens)):
        token = tokens[i]
        for k in range(top):
            token_ids[token, k], token_logits[token, k] = top_ids[i, k], top_logits[i, k]
        if not full:
            token_ids[token, top] = -1
        if before[i] >= 0:
            slot = pair_slot(before[i], token, len(pair_keys))
            pair_keys[slot] = (np.int64(before[i]) << 32) | token
            for k in range(top):
                pair_ids[slot, k], pair_logits[slot, k] = top_ids[i, k], top_logits[i, k]
            if not full:
                pair_ids[slot, top] = -1
