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
    for i in range(len(tokens)):
        token = tokens[i]
        put(tables.token_ids[token], tables.token_logits[token], top_ids[i], top_logits[i])
        if before[i] >= 0:
            slot = pair_slot(before[i], token, len(tables.pair_keys))
            tables.pair_keys[slot] = (np.int64(before[i]) << 32) | token
            put(tables.pair_ids[slot], tables.pair_logits[slot], top_ids[i], top_logits[i])


@jit
def put(ids, logits, top_ids, top_logits):  # type: ignore[no-untyped-def]
    """Fill a row; -1 ends it, and what is behind that is never read."""
    for k in range(len(top_ids)):
        ids[k], logits[k] = top_ids[k], top_logits[k]
    if len(top_ids) < len(ids):
        ids[len(top_ids)] = -1
