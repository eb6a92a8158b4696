"""A suffix index: where the last tokens of a text occurred before, found through chained hashes.

For each of a few lengths n the index knows the latest place where the last n tokens had the same hash, and from each
place the previous one, as the match finders of compressors do. A look-up follows a bounded number of these links, from
the longest n down, and compares the tokens themselves. Its time does not depend on how much is stored; adding a token
takes a few writes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lookfar.core.addresses import address_of, ints_at, longs_at
from lookfar.core.arrays import Int32s, Ints
from lookfar.core.host_team import job_of, present_team, run_parts
from lookfar.core.jit import borrowing_jit, inline_jit, jit

END = -1  # separates two texts
MAX_LINKS = 24  # links followed for each length
MAX_MATCH = 32  # matches are measured up to this length
TEXTS_EACH = 4  # followed by a thread at the least


# Where the arrays of an index are, how large they are, and how many tokens it holds.
TOKENS_AT, HEADS_AT, LINKS_AT, ROOM, BUCKETS, SIZE = range(6)


# About a match: its length, the text whose end it matches, its place among the matches of that text in one index, and
# whether it is in the draft store.
LENGTH, QUERY, RANK, IN_STORE = range(4)


class Matches(NamedTuple):
    """Continuations of earlier occurrences: for each text the longest match first, then the latest."""

    continuations: Int32s  # [n, depth] `END` behind the end of each
    about: Int32s  # [4, n]


class SuffixIndex:
    """Texts one behind the other, at most `capacity` tokens. `lengths` are the chained n, longest first.

    There is `room` for so many tokens at first. When more comes, everything is indexed again.
    """

    def __init__(self, capacity: int, lengths: tuple[int, ...], room: int = 1 << 12) -> None:
        self.capacity = capacity
        self.lengths = np.array(lengths, dtype=np.int32)
        self.state: Ints = np.zeros(6, np.int64)  # for compiled code
        self._allocate(min(capacity, room), np.zeros(0, np.int32))

    def _allocate(self, room: int, tokens: Int32s) -> None:
        """Make arrays for `room` tokens and index `tokens` in them."""
        buckets = 1 << max(room - 1, 1).bit_length()
        self._tokens: Int32s = np.full(room, END, dtype=np.int32)  # the texts, `END` between them and behind the last
        self._heads: Int32s = np.full((len(self.lengths), buckets), -1, dtype=np.int32)  # the latest place of each hash
        self._links: Int32s = np.full((len(self.lengths), room), -1, dtype=np.int32)  # the previous one; -1: none
        self.room = room
        self._locate(buckets, 0)
        add_tokens(self.address, self.lengths, tokens)

    def _locate(self, buckets: int, size: int) -> None:
        """Tell compiled code where the arrays are."""
        arrays = self._tokens, self._heads, self._links
        self.state[:] = [*map(address_of, arrays), self.room, buckets, size]
        self.address = address_of(self.state)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Follow the arrays of a copy, which are elsewhere."""
        vars(self).update(attributes)
        self._locate(int(self.state[BUCKETS]), self.size)

    @property
    def size(self) -> int:
        """The number of tokens, `END` between texts included."""
        return int(self.state[SIZE])

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._heads.nbytes + self._links.nbytes

    @property
    def text(self) -> Int32s:
        """Everything stored, oldest first, `END` between texts."""
        return self._tokens[: self.size]

    def extend(self, ids: npt.ArrayLike) -> None:
        """Append to the last text. When the index is full, the older half is dropped."""
        new, half = np.asarray(ids, dtype=np.int32), self.capacity // 2
        if self.size + len(new) > self.capacity:
            new = new[-half:]
            self._allocate(self.capacity, self.text[max(self.size - half, 0) :])
        self.make_room(self.size + len(new))
        add_tokens(self.address, self.lengths, new)

    def make_room(self, size: int) -> None:
        """Make room for so many tokens, which must be within the capacity."""
        if size > self.room:
            self._allocate(min(self.capacity, 2 * size), self.text)

    def find(self, tail: Int32s, limit: int, depth: int) -> tuple[Int32s, Int32s]:
        """Find how the texts continued where they ended like `tail`.

        Returns at most `limit` continuations, [k, depth], and the lengths of their matches.
        """
        text: Ints = np.array([address_of(tail), 0, 0, len(tail), 0, len(tail)])
        wanted = np.array([[limit, depth]], np.int32)
        continuations, about = find_after(self.address, self.lengths, np.array([address_of(text)]), wanted)
        return continuations, about[LENGTH]


class FollowedTexts:
    """The indexes of several texts that grow, all with the same chained lengths."""

    def __init__(self, indexes: Seq[SuffixIndex]) -> None:
        self.indexes = indexes
        self.addresses: Ints = np.array([index.address for index in indexes])

    def find(self, texts: Seq[Seq[int]], wanted: Int32s, store: SuffixIndex | None = None) -> Matches:
        """Append what is new in each text, and find how it, or a text in the store, went on after such an end.

        `wanted` are the most matches in each of them and the tokens to copy from each, [texts, 2].
        """
        new: list[int] = []
        starts, sizes = [0], sizes_of(self.addresses).tolist()
        for index, ids, size in zip(self.indexes, texts, sizes, strict=True):
            if len(ids) > index.room:
                index.make_room(len(ids))
            new += ids[size:]
            starts.append(len(new))
        return self._extend_and_find(np.array(new, np.int32), np.array(starts), wanted, store)

    def _extend_and_find(self, new: Int32s, starts: Ints, wanted: Int32s, store: SuffixIndex | None) -> Matches:
        own = self.indexes[0]
        where = (store.address, store.lengths) if store is not None and store.size else (0, own.lengths)
        team = present_team(len(wanted) // TEXTS_EACH)
        return Matches(*add_and_find((self.addresses, own.lengths, new, starts), wanted, where, team))


@inline_jit
def arrays_of(address, lengths):  # type: ignore[no-untyped-def]
    """Return the state of an index, its texts, and the heads and links of its hash chains."""
    state = longs_at(address, 6)
    room, kinds = state[ROOM], len(lengths)
    tokens, links = ints_at(state[TOKENS_AT], room), ints_at(state[LINKS_AT], (kinds, room))
    return state, tokens, ints_at(state[HEADS_AT], (kinds, state[BUCKETS])), links


@inline_jit
def bucket_of(tokens, end, length, buckets):  # type: ignore[no-untyped-def]
    """Hash `length` tokens up to `end`; -1 if a text begins among them."""
    mixed, bucket = np.uint64(length), np.int64(0)
    for i in range(end - length + 1, end + 1):
        if i < 0 or tokens[i] < 0:
            bucket = np.int64(-1)
            break
        mixed = (mixed ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(31)
    return bucket if bucket < 0 else np.int64(mixed & np.uint64(buckets - 1))


@jit
def sizes_of(addresses):  # type: ignore[no-untyped-def]
    """Return how many tokens each index holds."""
    sizes = np.empty(len(addresses), np.int64)
    for i in range(len(addresses)):
        sizes[i] = longs_at(addresses[i], 6)[SIZE]
    return sizes


@jit
def add_tokens(address, lengths, new):  # type: ignore[no-untyped-def]
    """Append tokens to the text of an index, which has room for them."""
    state, tokens, heads, links = arrays_of(address, lengths)
    size = state[SIZE]
    for token in new:
        tokens[size] = token
        for i in range(len(lengths)):
            bucket = bucket_of(tokens, size, lengths[i], heads.shape[1])
            if bucket >= 0:
                links[i, size] = heads[i, bucket]
                heads[i, bucket] = size
        size += 1
    state[SIZE] = size


@inline_jit
def match_length(tokens, place, tail):  # type: ignore[no-untyped-def]
    length = 0
    while length < MAX_MATCH and length < len(tail) and length <= place:
        token = tokens[place - length]
        if token < 0 or token != tail[len(tail) - 1 - length]:
            break
        length += 1
    return length


@jit
def find_places(address, lengths, tail, limit, room):  # type: ignore[no-untyped-def]
    """Find the places where the text went on after an end like `tail`, the longest match first, then the latest.

    They and the lengths of the matches are written to `room`; returns how many there are, `limit` of which are enough.
    """
    places, matched = room
    state, tokens, heads, links = arrays_of(address, lengths)
    size, count = state[SIZE], 0
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
    for i in range(1, count):
        place, length, at = places[i], matched[i], i
        while at and (matched[at - 1] < length or (matched[at - 1] == length and places[at - 1] < place)):
            places[at], matched[at] = places[at - 1], matched[at - 1]
            at -= 1
        places[at], matched[at] = place, length
    return count


@inline_jit
def copy_continuation(tokens, size, place, continuation, depth):  # type: ignore[no-untyped-def]
    """Copy what follows `place`. A match that runs into the end of the text repeats itself, as loops do."""
    period = size - 1 - place
    for j in range(depth):
        at = place + 1 + j
        if at < size:
            if tokens[at] < 0:
                break
            continuation[j] = tokens[at]
        elif j >= period:
            continuation[j] = continuation[j - period]


@inline_jit
def new_matches(wanted, kinds):  # type: ignore[no-untyped-def]
    most, depth = kinds * wanted[:, 0].sum(), wanted[:, 1].max()
    return np.full((most, depth), END, np.int32), np.empty((4, most), np.int32)


@inline_jit
def add_matches(address, lengths, tail, wanted, found, room):  # type: ignore[no-untyped-def]
    """Add the matches of a tail to `found`: the arrays, and the number of the match, the text, and the kind of index.

    Returns the number of matches.
    """
    continuations, about, count, query, in_store = found
    state, tokens, _, _ = arrays_of(address, lengths)
    for k in range(min(find_places(address, lengths, tail, wanted[0], room), wanted[0])):
        copy_continuation(tokens, state[SIZE], room[0][k], continuations[count], wanted[1])
        about[LENGTH, count], about[QUERY, count] = room[1][k], query
        about[RANK, count], about[IN_STORE, count] = k, in_store
        count += 1
    return count


@inline_jit
def tail_of(address):  # type: ignore[no-untyped-def]
    """Return the last tokens of the text at an address."""
    state = longs_at(address, 6)
    return ints_at(state[TOKENS_AT], state[ROOM])[max(state[SIZE] - MAX_MATCH, 0) : state[SIZE]]


@jit
def find_after(address, lengths, texts, wanted):  # type: ignore[no-untyped-def]
    """Find the matches of the ends of several texts in one index. Returns the arrays of `Matches`."""
    continuations, about = new_matches(wanted, 1)
    room = np.empty(MAX_LINKS * len(lengths), np.int32), np.empty(MAX_LINKS * len(lengths), np.int32)
    count = 0
    for query in range(len(texts)):
        found = continuations, about, count, query, 1
        count = add_matches(address, lengths, tail_of(texts[query]), wanted[query], found, room)
    return continuations[:count], about[:, :count]


@jit
def add_and_find(texts, wanted, store, team):  # type: ignore[no-untyped-def]
    """Append tokens to several indexes, each with room for them, and find the matches of the end of each text.

    `texts` are the addresses of the indexes, their chained lengths, and what is new: index i gets the tokens
    `new[starts[i] : starts[i + 1]]`. Matches are looked for in the index itself, and in the store: its address (0 for
    none) and its chained lengths. The threads of a team share the work. Returns the arrays of `Matches`.
    """
    addresses, lengths, _, _ = texts
    threads, parts = team
    kinds = 2 if store[0] else 1
    continuations, about = new_matches(wanted, kinds)
    links = MAX_LINKS * max(len(lengths), len(store[1]))
    room = np.empty((parts, links), np.int32), np.empty((parts, links), np.int32)
    firsts, counts = np.empty(parts, np.int64), np.empty(parts, np.int64)  # of the matches of each part
    room_before, query = 0, 0
    for part in range(parts):
        while query < part * len(addresses) // parts:
            room_before += kinds * wanted[query, 0]
            query += 1
        firsts[part] = room_before
    data = texts, wanted, store, (continuations, about, firsts, counts), room
    run_parts(threads, parts, job_of(follow_part, data))
    count = counts[0]
    for part in range(1, parts):
        for i in range(firsts[part], firsts[part] + counts[part]):
            continuations[count], about[:, count] = continuations[i], about[:, i]
            count += 1
    return continuations[:count], about[:, :count]


@borrowing_jit
def follow_part(data, part):  # type: ignore[no-untyped-def]
    """Append tokens and find matches for a part of the texts, as `add_and_find` says."""
    (addresses, lengths, new, starts), wanted, store, matches, room = data
    continuations, about, firsts, counts = matches
    own_room, parts = (room[0][part], room[1][part]), len(counts)
    count = firsts[part]
    for query in range(part * len(addresses) // parts, (part + 1) * len(addresses) // parts):
        address = addresses[query]
        add_tokens(address, lengths, new[starts[query] : starts[query + 1]])
        found = continuations, about, count, query, 0
        count = add_matches(address, lengths, tail_of(address), wanted[query], found, own_room)
        if store[0]:
            found = continuations, about, count, query, 1
            count = add_matches(store[0], store[1], tail_of(address), wanted[query], found, own_room)
    counts[part] = count - firsts[part]
