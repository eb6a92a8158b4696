"""Where did the text stand like this before? Chained hashes of the last n tokens, as compressors find their matches.

For each of a few lengths n the index knows the latest place where the last n tokens hashed alike, and from each place
the one before it. A look-up follows a bounded number of these links, from the longest n down, and checks the tokens
themselves; so its time does not depend on how much is stored, and adding a token takes a few writes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from lookfar.arrays import Int32s
from lookfar.jit import jit

END = -1  # stands between two texts
VISITS = 24  # links followed for each length
LONGEST = 32  # matches are measured up to this


class TokenIndex:
    """Texts one behind the other. `lengths` are the n for which places are chained, longest first."""

    def __init__(self, capacity: int, lengths: tuple[int, ...]) -> None:
        self.lengths = np.array(lengths, dtype=np.int32)
        self.capacity = capacity
        self.size = 0
        self._allocate(min(capacity, 1 << 12))

    def _allocate(self, room: int) -> None:
        buckets = 1 << max(room - 1, 1).bit_length()
        tokens = getattr(self, "tokens", np.zeros(0, np.int32))[: self.size]
        self.tokens: Int32s = np.full(room, END, dtype=np.int32)
        self.heads: Int32s = np.full((len(self.lengths), buckets), -1, dtype=np.int32)
        self.links: Int32s = np.full((len(self.lengths), room), -1, dtype=np.int32)
        self.size = 0
        self._add(tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.heads.nbytes + self.links.nbytes

    @property
    def text(self) -> Int32s:
        """Everything stored, oldest first, `END` between texts."""
        return self.tokens[: self.size]

    def extend(self, ids: npt.ArrayLike) -> None:
        """Go on with the text at the end. When there is no room left, the older half is forgotten."""
        new = np.asarray(ids, dtype=np.int32)
        if self.size + len(new) > self.capacity:
            new = new[-(self.capacity // 2) :]
            self.tokens = self.tokens[max(self.size - self.capacity // 2, 0) : self.size]
            self.size = len(self.tokens)
            self._allocate(self.capacity)
        elif self.size + len(new) > len(self.tokens):
            self._allocate(min(self.capacity, 2 * (self.size + len(new))))
        self._add(new)

    def _add(self, new: Int32s) -> None:
        self.size = add_tokens(self.tokens, self.size, self.heads, self.links, self.lengths, new)

    def follow(self, ids: Seq[int], limit: int, depth: int) -> tuple[Int32s, Int32s]:
        """Go on with the text and find how it went on where it last ended like it does now."""
        if self.size + len(ids) > len(self.tokens):
            self.extend(ids)
            ids = ()
        new = np.array(ids, dtype=np.int32)
        self.size, continuations, matched = add_and_find(
            self.tokens, self.size, self.heads, self.links, self.lengths, new, limit, depth
        )
        return continuations, matched

    def find(self, tail: Int32s, limit: int, depth: int) -> tuple[Int32s, Int32s]:
        """How the text went on where it last ended like `tail`: continuations [k, depth] and match lengths [k],
        the longest match first, then the latest."""
        found: tuple[Int32s, Int32s] = find_matches(
            self.tokens, self.size, self.heads, self.links, self.lengths, tail, limit, depth
        )
        return found


@jit
def bucket_of(tokens, end, length, buckets):  # type: ignore[no-untyped-def]
    """The hash of `length` tokens up to `end`; -1 if a text begins among them."""
    mixed = np.uint64(length)
    for i in range(end - length + 1, end + 1):
        if i < 0 or tokens[i] < 0:
            return -1
        mixed = (mixed ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(31)
    return np.int64(mixed & np.uint64(buckets - 1))


@jit
def add_tokens(tokens, size, heads, links, lengths, new):  # type: ignore[no-untyped-def]
    for token in new:
        tokens[size] = token
        for i in range(len(lengths)):
            bucket = bucket_of(tokens, size, lengths[i], heads.shape[1])
            if bucket >= 0:
                links[i, size] = heads[i, bucket]
                heads[i, bucket] = size
        size += 1
    return size


@jit
def match_length(tokens, place, tail):  # type: ignore[no-untyped-def]
    length = 0
    while length < LONGEST and length < len(tail) and length <= place:
        token = tokens[place - length]
        if token < 0 or token != tail[len(tail) - 1 - length]:
            break
        length += 1
    return length


@jit
def find_matches(tokens, size, heads, links, lengths, tail, limit, depth):  # type: ignore[no-untyped-def]
    most = VISITS * len(lengths)
    places = np.empty(most, np.int32)
    matched = np.empty(most, np.int32)
    count = 0
    for i in range(len(lengths)):
        bucket = bucket_of(tail, len(tail) - 1, lengths[i], heads.shape[1])
        place = heads[i, bucket] if bucket >= 0 else -1
        known = count
        for _ in range(VISITS):
            if place < 0:
                break
            if place + 1 < size and tokens[place + 1] >= 0:
                length = match_length(tokens, place, tail)
                fresh = length >= lengths[i]
                for k in range(known):
                    fresh = fresh and places[k] != place
                if fresh:
                    places[count], matched[count] = place, length
                    count += 1
            place = links[i, place]
        if count >= limit:
            break
    order = np.argsort(-(matched[:count].astype(np.int64) << 32) - places[:count])[:limit]
    continuations = np.full((len(order), depth), END, np.int32)
    for k in range(len(order)):
        place = places[order[k]]
        for j in range(depth):
            at = place + 1 + j
            if at < size:
                if tokens[at] < 0:
                    break
                continuations[k, j] = tokens[at]
            elif j >= size - 1 - place:
                # A match that runs into the end repeats itself, as loops do.
                continuations[k, j] = continuations[k, j - (size - 1 - place)]
    return continuations, matched[order]


@jit
def add_and_find(tokens, size, heads, links, lengths, new, limit, depth):  # type: ignore[no-untyped-def]
    size = add_tokens(tokens, size, heads, links, lengths, new)
    tail = tokens[max(size - LONGEST, 0) : size]
    continuations, matched = find_matches(tokens, size, heads, links, lengths, tail, limit, depth)
    return size, continuations, matched
