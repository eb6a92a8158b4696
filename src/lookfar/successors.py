"""What the model last predicted after each token and after each pair of tokens, in fixed memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lookfar.arrays import Floats, Int32s
from lookfar.jit import jit

TOP = 8  # predictions kept for each token and pair


class Successors:
    """For every token of the vocabulary, and for `pairs` pairs (a newer pair replaces one that falls on its slot)."""

    def __init__(self, vocab_size: int, pairs: int) -> None:
        top = min(TOP, vocab_size)
        self.token_ids: Int32s = np.full((vocab_size, top), -1, np.int32)
        self.token_logits: Floats = np.zeros((vocab_size, top), np.float32)
        self.pair_keys = np.full(pairs, -1, np.int64)  # a power of two of them
        self.pair_ids: Int32s = np.full((pairs, top), -1, np.int32)
        self.pair_logits: Floats = np.zeros((pairs, top), np.float32)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.token_ids, self.token_logits, self.pair_keys, self.pair_ids, self.pair_logits

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def learn(self, before: Int32s, tokens: Int32s, top_ids: Int32s, top_logits: Floats) -> None:
        """Rows with token `tokens[i]` behind `before[i]` (-1: nothing) predicted `top_ids[i]`, best first."""
        remember(*self.arrays, before, tokens, top_ids, top_logits)


NO_SUCCESSORS = Successors(0, 0)


@jit
def pair_slot(before, token, slots):  # type: ignore[no-untyped-def]
    mixed = np.uint64(before) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed >> np.uint64(29)) & np.uint64(slots - 1))


@jit
def remember(token_ids, token_logits, pair_keys, pair_ids, pair_logits, before, tokens, top_ids, top_logits):  # type: ignore[no-untyped-def]
    for i in range(len(tokens)):
        token = tokens[i]
        for k in range(top_ids.shape[1]):
            token_ids[token, k], token_logits[token, k] = top_ids[i, k], top_logits[i, k]
        if before[i] >= 0:
            slot = pair_slot(before[i], token, len(pair_keys))
            pair_keys[slot] = (np.int64(before[i]) << 32) | token
            for k in range(top_ids.shape[1]):
                pair_ids[slot, k], pair_logits[slot, k] = top_ids[i, k], top_logits[i, k]
