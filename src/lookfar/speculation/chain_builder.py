"""Draft chains: for each text of a batch the line of tokens that most likely follows, with its probability.

The probability of a token is blended over match lengths, as PPM compressors do. Short matches are many and say what is
frequent; long ones are few and usually right. Starting with the counts of the pool, the estimate of each match length
is the share of the matches at least as long that go on with the token, and the estimate of the next shorter length
counts as a few more matches, the fewer the longer the match. A chain takes the most likely token, goes on with the
matches that agree with it, and ends where it is unlikely to be accepted as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookfar.core.addresses import ints_at, longs_at
from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import inline_jit, jit
from lookfar.retrieval.follower_pool import FOLLOWERS, find_followers
from lookfar.retrieval.suffix_index import (
    END,
    MAX_LINKS,
    SIZE,
    TOKENS_AT,
    add_tokens,
    arrays_of,
    copy_continuation,
    find_places,
    tail_of,
)
from lookfar.speculation.calibration import MEMORY, bucket_of

BRANCHES = 16  # places in each text that are copied from
MAX_CANDIDATES = 2 * (BRANCHES + FOLLOWERS)
# How many matches the estimate of the next shorter context is worth.
SHORTER_MATCH = 2.0  # divided by the length of the match
SHORTER_PAIR = 1.5
UNKNOWN = 1.0  # of the pool: other tokens than those that have followed
STORED = 0.7  # the weight of a match in the store, beside those in the request's own text


class TokenRows(NamedTuple):
    """The texts of a batch as an engine keeps them: text i is `tokens[places[i], : sizes[i]]`."""

    tokens: Int32s
    places: Ints
    sizes: Ints

    def text(self, i: int) -> Int32s:
        """Return one of the texts."""
        return self.tokens[self.places[i], : self.sizes[i]]

    def continue_texts(self, addresses: Ints) -> list[bool]:
        """Return whether each row starts with the text of the index at an address; 0 stands for no text."""
        found: list[bool] = continue_texts(addresses, tuple(self)).tolist()
        return found


class DraftChains(NamedTuple):
    """The chains of a batch. They are longer than what is drafted, to learn how likely the next tokens were."""

    tokens: Int32s  # [batch, longest] -1 behind the end of a chain
    scores: Floats  # [batch, longest] the estimated probability that the chain is accepted up to here
    lengths: Ints  # [batch] the tokens to draft


class Candidates(NamedTuple):
    """Room for the matches of a text, and for the tokens that may follow."""

    continuations: Int32s  # [matches, longest]
    lengths: Int32s  # [matches] ascending
    weights: Floats  # [matches]
    order: Int32s  # [matches] that agree with the chain, by length
    token_of: Int32s  # [matches] the candidate that each goes on with, -1 for none
    tokens: Int32s  # [candidates]
    chances: Floats  # [candidates]
    counts: Floats  # [candidates] the weight of the matches behind each


@jit
def build(texts, rows, store, pool, limits):  # type: ignore[no-untyped-def]
    """Append what is new in each row to its text, and build the chains. Returns the arrays of `DraftChains`.

    `texts` are the addresses of the indexes, which have room, and their chained lengths; `store` is the same for one
    index (0 for none). `limits` are the most tokens of each chain, the longest chain, the least probability, the counts
    of the calibration, and the size of the vocabulary.
    """
    addresses, lengths = texts
    all_tokens, places, sizes = rows
    depths, longest, least, calibration, vocab_size = limits
    batch = len(addresses)
    tokens, scores = np.full((batch, longest), END, np.int32), np.zeros((batch, longest), np.float32)
    drafted = np.zeros(batch, np.int64)
    links = MAX_LINKS * max(len(lengths), len(store[1]))
    room = np.empty(links, np.int32), np.empty(links, np.int32)
    work = new_candidates(longest)
    for b in range(batch):
        known = longs_at(addresses[b], 6)[SIZE]
        add_tokens(addresses[b], lengths, all_tokens[places[b], known : sizes[b]])
        depth = min(longest, depths[b])
        if depth < 1:
            continue
        tail = tail_of(addresses[b])
        count = read_matches(addresses[b], lengths, tail, room, work, (0, depth, np.float32(1.0)))
        if store[0]:
            count = read_matches(store[0], store[1], tail, room, work, (count, depth, np.float32(STORED)))
        before, last = (tail[-2] if len(tail) > 1 else np.int32(END)), tail[-1]
        score, open_end = np.float32(1.0), True
        for d in range(depth):
            best, chance = choose(work, count, d, (before, last), pool, vocab_size)
            score *= chance
            if best < 0 or score < least / 2:
                break
            tokens[b, d], scores[b, d] = best, score
            bucket = bucket_of(score)
            open_end = open_end and score * calibration[1, bucket] >= least * calibration[0, bucket]
            if open_end:
                drafted[b] = d + 1
            count = keep_agreeing(work, count, d, best)
            before, last = last, best
    return tokens, scores, drafted


@inline_jit
def new_candidates(longest):  # type: ignore[no-untyped-def]
    return Candidates(
        np.empty((2 * BRANCHES, longest), np.int32),
        np.empty(2 * BRANCHES, np.int32),
        np.empty(2 * BRANCHES, np.float32),
        np.empty(2 * BRANCHES, np.int32),
        np.empty(2 * BRANCHES, np.int32),
        np.empty(MAX_CANDIDATES, np.int32),
        np.empty(MAX_CANDIDATES, np.float32),
        np.empty(MAX_CANDIDATES, np.float32),
    )


@inline_jit
def read_matches(address, lengths, tail, room, work, about):  # type: ignore[no-untyped-def]
    """Add the matches of a tail in one index, sorted by length; returns how many there are.

    `about` is the number of matches so far, the tokens to copy, and the weight of these matches.
    """
    count, depth, weight = about
    state, tokens, _, _ = arrays_of(address, lengths)
    for k in range(min(find_places(address, lengths, tail, BRANCHES, room), BRANCHES)):
        work.continuations[count] = END
        copy_continuation(tokens, state[SIZE], room[0][k], work.continuations[count], depth)
        work.lengths[count], work.weights[count] = room[1][k], weight
        at = count
        while at and work.lengths[work.order[at - 1]] > room[1][k]:
            work.order[at] = work.order[at - 1]
            at -= 1
        work.order[at] = count
        count += 1
    return count


@inline_jit
def choose(work, count, depth, pair, pool, vocab_size):  # type: ignore[no-untyped-def]
    """Return the most likely token at a depth and its probability; -1 for none.

    `pair` are the two tokens before it.
    """
    tokens, chances = work.tokens, work.chances
    width = read_pool(pool, pair, tokens, chances)
    for i in range(count):
        token = work.continuations[work.order[i], depth]
        work.token_of[i] = -1
        if 0 <= token < vocab_size:
            work.token_of[i], width = place_of(tokens, chances, width, token)
    blend_lengths(work, count, depth, width)
    best, chance = np.int32(-1), np.float32(0.0)
    for k in range(width):
        if chances[k] > chance and tokens[k] < vocab_size:
            best, chance = tokens[k], chances[k]
    return best, chance


@inline_jit
def blend_lengths(work, count, depth, width):  # type: ignore[no-untyped-def]
    """Blend the estimates of all match lengths into those of the pool."""
    chances, counts = work.chances, work.counts
    counts[:width] = 0
    total = np.float32(0.0)
    for i in range(count):
        if work.token_of[i] >= 0:
            counts[work.token_of[i]] += work.weights[work.order[i]]
            total += work.weights[work.order[i]]
    i = 0
    while i < count:
        length = work.lengths[work.order[i]]
        shorter = np.float32(SHORTER_MATCH) / np.float32(length + depth)
        for k in range(width):
            chances[k] = (counts[k] + shorter * chances[k]) / (total + shorter)
        while i < count and work.lengths[work.order[i]] == length:  # only longer matches are left
            if work.token_of[i] >= 0:
                counts[work.token_of[i]] -= work.weights[work.order[i]]
                total -= work.weights[work.order[i]]
            i += 1


@jit
def place_of(tokens, chances, width, token):  # type: ignore[no-untyped-def]
    """Return the place of a token among the candidates, added if it is new, and their number."""
    for k in range(width):
        if tokens[k] == token:
            return k, width
    tokens[width], chances[width] = token, 0.0
    return width, width + 1


@jit
def read_pool(pool, pair, tokens, chances):  # type: ignore[no-untyped-def]
    """Make the followers of a token and of a pair the first candidates; returns their number."""
    token_ids, token_counts, pair_keys, pair_ids, pair_counts = pool
    before, last = pair
    width = 0
    if 0 <= last < len(token_ids):
        total = token_counts[last].sum() + np.float32(UNKNOWN)
        while width < FOLLOWERS and token_ids[last, width] >= 0:
            tokens[width], chances[width] = token_ids[last, width], token_counts[last, width] / total
            width += 1
    slot = find_followers(pair_keys, before, last)
    if slot >= 0:
        total = pair_counts[slot].sum() + np.float32(SHORTER_PAIR)
        for k in range(width):
            chances[k] *= np.float32(SHORTER_PAIR) / total
        for j in range(FOLLOWERS):
            if pair_ids[slot, j] < 0:
                break
            place, width = place_of(tokens, chances, width, pair_ids[slot, j])
            chances[place] += pair_counts[slot, j] / total
    return width


@inline_jit
def keep_agreeing(work, count, depth, token):  # type: ignore[no-untyped-def]
    """Keep the matches that go on with a token; returns how many."""
    kept = 0
    for i in range(count):
        if work.continuations[work.order[i], depth] == token:
            work.order[kept] = work.order[i]
            kept += 1
    return kept


@jit
def continue_texts(addresses, rows):  # type: ignore[no-untyped-def]
    all_tokens, places, sizes = rows
    found = np.zeros(len(addresses), np.bool_)
    for i in range(len(addresses)):
        if addresses[i]:
            state = longs_at(addresses[i], 6)
            size = state[SIZE]
            text, row = ints_at(state[TOKENS_AT], size), all_tokens[places[i]]
            at = size - 1 if size <= sizes[i] else np.int64(0)
            found[i] = size <= sizes[i]
            while found[i] and at >= 0:  # from its end, where texts differ first
                found[i] = text[at] == row[at]
                at -= 1
    return found


@jit
def learn(calibration, chains, emitted, starts):  # type: ignore[no-untyped-def]
    """Count expected and accepted tokens by estimate; text b went on with `emitted[starts[b] : starts[b + 1]]`.

    Returns how many tokens of each chain were right.
    """
    tokens, scores, _ = chains
    right = np.zeros(len(tokens), np.int64)
    for b in range(len(tokens)):
        known, agrees = starts[b + 1] - starts[b], True
        if known == 0:
            continue
        for d in range(tokens.shape[1]):
            if tokens[b, d] < 0 or (agrees and d >= known):
                break
            agrees = agrees and tokens[b, d] == emitted[starts[b] + d]
            bucket = bucket_of(scores[b, d])
            calibration[0, bucket] += scores[b, d]
            if agrees:
                calibration[1, bucket] += 1.0
                right[b] += 1
    for bucket in range(calibration.shape[1]):
        if calibration[0, bucket] > MEMORY:
            calibration[:, bucket] *= 0.5
    return right
