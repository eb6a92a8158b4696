"""A suffix index: where the last tokens of a text occurred before, found through chained hashes.

For each of a few lengths n the index knows the latest place where the last n tokens had the same hash, and from each
place the previous one, as the match finders of compressors do. A look-up follows a bounded number of these links, from
the longest n down, and compares the tokens themselves. Its time does not depend on how much is stored; adding a token
takes a few writes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lookfar.core.arrays import Int32s
from lookfar.core.jit import jit

END = -1  # separates two texts
MAX_LINKS = 24  # links followed for each length
MAX_MATCH = 32  # matches are measured up to this length


class IndexArrays(NamedTuple):
    """The arrays of an index. Compiled code takes them as a plain tuple, which numba unpacks faster."""

    tokens: Int32s  # [room] the texts, `END` between them and behind the last token
    heads: Int32s  # [lengths, buckets] the latest place of each hash, -1 for none
    links: Int32s  # [lengths, room] the previous place with the same hash, -1 for none
    lengths: Int32s  # [lengths] the chained n, longest first


class SuffixIndex:
    """Texts one behind the other, at most `capacity` tokens. `lengths` are the chained n, longest first."""

    def __init__(self, capacity: int, lengths: tuple[int, ...]) -> None:
        self.capacity = capacity
        self.size = 0
        self._lengths = np.array(lengths, dtype=np.int32)
        self._allocate(min(capacity, 1 << 12), np.zeros(0, np.int32))

    def _allocate(self, room: int, tokens: Int32s) -> None:
        """Make arrays for `room` tokens and index `tokens` in them."""
        buckets = 1 << max(room - 1, 1).bit_length()
        self.arrays = IndexArrays(
            np.full(room, END, dtype=np.int32),
            np.full((len(self._lengths), buckets), -1, dtype=np.int32),
            np.full((len(self._lengths), room), -1, dtype=np.int32),
            self._lengths,
        )
        self.size = add_tokens(tuple(self.arrays), 0, tokens)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays[:3])

    @property
    def text(self) -> Int32s:
        """Everything stored, oldest first, `END` between texts."""
        return self.arrays.tokens[: self.size]

    def extend(self, ids: npt.ArrayLike) -> None:
        """Append to the last text. When the index is full, the older half is dropped."""
        new = np.asarray(ids, dtype=np.int32)
        if self.size + len(new) > self.capacity:
            new = new[-(self.capacity // 2) :]
            self._allocate(self.capacity, self.text[max(self.size - self.capacity // 2, 0) :])
        elif self.size + len(new) > len(self.arrays.tokens):
            self._allocate(min(self.capacity, 2 * (self.size + len(new))), self.text)
        self.size = add_tokens(tuple(self.arrays), self.size, new)

    def extend_and_find(self, ids: Seq[int], limit: int, depth: int) -> tuple[Int32s, Int32s]:
        """Append to the text, then find the continuations of earlier occurrences of its last tokens."""
        if self.size + len(ids) > len(self.arrays.tokens):
            self.extend(ids)
            ids = ()
        new = np.array(ids, dtype=np.int32)
        self.size, continuations, matched = add_and_find(tuple(self.arrays), self.size, new, limit, depth)
        return continuations, matched

    def find(self, tail: Int32s, limit: int, depth: int) -> tuple[Int32s, Int32s]:
        """Find how the texts continued where they ended like `tail`.

        Returns continuations, [k, depth], and match lengths, [k]: the longest match first, then the latest.
        """
        found: tuple[Int32s, Int32s] = find_matches(tuple(self.arrays), self.size, tail, limit, depth)
        return found


@jit
def bucket_of(tokens, end, length, buckets):  # type: ignore[no-untyped-def]
    """Hash `length` tokens up to `end`; -1 if a text begins among them."""
    mixed = np.uint64(length)
    for i in range(end - length + 1, end + 1):
        if i < 0 or tokens[i] < 0:
            return -1
        mixed = (mixed ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(31)
    return np.int64(mixed & np.uint64(buckets - 1))


@jit
def add_tokens(arrays, size, new):  # type: ignore[no-untyped-def]
    tokens, heads, links, lengths = arrays
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
    while length < MAX_MATCH and length < len(tail) and length <= place:
        token = tokens[place - length]
        if token < 0 or token != tail[len(tail) - 1 - length]:
            break
        length += 1
    return length


@jit
def find_matches(arrays, size, tail, limit, depth):  # type: ignore[no-untyped-def]
    tokens, heads, links, lengths = arrays
    most = MAX_LINKS * len(lengths)
    places = np.empty(most, np.int32)
    matched = np.empty(most, np.int32)
    count = 0
    for i in range(len(lengths)):
        bucket = bucket_of(tail, len(tail) - 1, lengths[i], heads.shape[1])
        place = heads[i, bucket] if bucket >= 0 else -1
        known = count
        for _ in range(MAX_LINKS):
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
        copy_continuation(tokens, size, places[order[k]], continuations[k])
    return continuations, matched[order]


@jit
def copy_continuation(tokens, size, place, continuation):  # type: ignore[no-untyped-def]
    """Copy what follows `place`. A match that runs into the end of the text repeats itself, as loops do."""
    period = size - 1 - place
    for j in range(len(continuation)):
        at = place + 1 + j
        if at < size:
            if tokens[at] < 0:
                break
            continuation[j] = tokens[at]
        elif j >= period:
            continuation[j] = continuation[j - period]


@jit
def add_and_find(arrays, size, new, limit, depth):  # type: ignore[no-untyped-def]
    size = add_tokens(arrays, size, new)
    tokens = arrays[0]
    tail = tokens[max(size - MAX_MATCH, 0) : size]
    continuations, matched = find_matches(arrays, size, tail, limit, depth)
    return size, continuations, matched
