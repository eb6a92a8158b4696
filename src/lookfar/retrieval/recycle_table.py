"""The recycle table: what the model last predicted after each token and after each pair of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lookfar.core.addresses import address_of, floats_at, ints_at, longs_at
from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.host_team import job_of, present_team, run_parts
from lookfar.core.jit import borrowing_jit, inline_jit, jit
from lookfar.core.plan import COMPLETE, FIRST_NODE, FIRST_PENDING, NUM_NODES, NUM_PENDING, PREDICT, FlatPlan
from lookfar.retrieval.off_path import PER_POSITION, POSITIONS, merge_off_path, new_merge_room, room_of

ROWS_EACH, MOST_PARTS = 16, 4  # rows of a step for each part of learning at the least; every part reads all rows
TOP_K = 8  # predictions kept for each token and pair
NO_CONTEXT = -1  # the time of predictions after a token alone, from the prior
SAMPLED_TOP_K = 24  # the same for sampled texts, where the sampling noise says which of them to draft


class RecycleArrays(NamedTuple):
    """The arrays of a recycle table. Compiled code takes them as a plain tuple, which numba unpacks faster."""

    token_ids: Int32s  # [vocabulary, k] most likely first, -1 behind the last one
    token_logits: Floats
    pair_keys: Ints  # [pairs] the pair that a slot holds, -1 for none; a power of two of them
    pair_ids: Int32s  # [pairs, k]
    pair_logits: Floats
    triple_keys: Ints  # [triples] a hash of the three tokens, -1 for none
    triple_ids: Int32s  # [triples, k]
    triple_logits: Floats
    times: Int32s  # [vocabulary + pairs + triples] when each row was learned
    marks: Int32s  # [vocabulary] when a token was last part of a text; 0: never
    clock: Int32s  # [2] steps and tokens of texts so far


class RecycleTable:
    """Predictions after every token of the vocabulary, and after `pairs` pairs and as many triples of tokens.

    A new pair or triple replaces a colliding one.
    """

    def __init__(self, vocab_size: int, pairs: int, lasting: bool = False) -> None:
        k = min(SAMPLED_TOP_K, vocab_size)
        self.arrays = RecycleArrays(
            np.full((vocab_size, k), -1, np.int32),
            np.zeros((vocab_size, k), np.float32),
            np.full(pairs, -1, np.int64),
            np.full((pairs, k), -1, np.int32),
            np.zeros((pairs, k), np.float32),
            np.full(pairs, -1, np.int64),
            np.full((pairs, k), -1, np.int32),
            np.zeros((pairs, k), np.float32),
            np.zeros(vocab_size + 2 * pairs, np.int32),
            np.zeros(vocab_size, np.int32),
            np.ones(2, np.int32),
        )
        if lasting:  # written now: the system hands out pages of zeros one by one, while requests wait
            for array in self.arrays:
                array *= 1

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def set_prior(self, first: int, ids: Int32s, logits: Floats) -> None:
        """Start with predictions after the tokens `first …` alone, [tokens, k], where nothing was learned."""
        arrays, k = self.arrays, ids.shape[1]
        new = first + np.flatnonzero(arrays.token_ids[first : first + len(ids), 0] < 0)
        arrays.token_ids[new, :k], arrays.token_logits[new, :k] = ids[new - first], logits[new - first]
        arrays.times[new] = NO_CONTEXT

    def learn(self, before: Int32s, tokens: Int32s, top_ids: Int32s, top_logits: Floats) -> None:
        """Store that the model predicted `top_ids[i]`, most likely first, after `tokens[i]`.

        `before[i]` is the token before `tokens[i]`, or -1.
        """
        store_predictions(tuple(self.arrays), before, tokens, top_ids, top_logits)

    def learn_step(self, plan: FlatPlan, about: Ints, top: tuple[Int32s, Floats], runner_ups: Ints) -> None:
        """Learn what was predicted after the rows of a step, for some of its requests.

        `about` says which ones and where their rows are (`BatchOutcome`). `runner_ups` are the addresses of their
        runner-ups, which are set.
        """
        team = present_team(min(plan.nodes.shape[1] // ROWS_EACH, MOST_PARTS))
        learn_rows(tuple(self.arrays), tuple(plan), about, top, runner_ups, team)


class RunnerUps:
    """The alternatives to the last token of a text, most likely first."""

    def __init__(self) -> None:
        self.tokens: Int32s = np.full(SAMPLED_TOP_K - 1, -1, np.int32)  # -1 for none
        self.logits: Floats = np.zeros(SAMPLED_TOP_K - 1, np.float32)
        self.off_path: Int32s = np.zeros((2, POSITIONS, PER_POSITION), np.int32)
        self._locate()

    def _locate(self) -> None:
        """Tell compiled code where the arrays are."""
        self._arrays: Ints = np.array([address_of(a) for a in (self.tokens, self.logits, self.off_path)])
        self.address = address_of(self._arrays)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Follow the arrays of a copy, which are elsewhere."""
        vars(self).update(attributes)
        self._locate()

    def set(self, top_ids: Int32s, top_logits: Floats, emitted: int) -> None:
        """Take the most likely tokens except the one that was emitted; the first one if that is not known (-1)."""
        set_runner_ups(self.address, top_ids, top_logits, emitted)


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
def triple_key(first, before, last):  # type: ignore[no-untyped-def]
    """Return a hash of three tokens, never negative."""
    mixed = (np.uint64(first) * np.uint64(0x9E3779B97F4A7C15)) ^ (
        (np.uint64(before) << np.uint64(32)) | np.uint64(last)
    ) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1))


@jit
def find_triple(keys, first, before, last):  # type: ignore[no-untyped-def]
    """Return the slot of three tokens, or -1 if the table does not hold them."""
    if first < 0 or before < 0 or not len(keys):
        return -1
    key = triple_key(first, before, last)
    slot = key & (len(keys) - 1)
    return slot if keys[slot] == key else -1


@inline_jit
def store_prediction(arrays, path, top, row, share):  # type: ignore[no-untyped-def]
    """Fill the rows of the last token, pair and triple of `path`; -1 ends a row, what lies behind it is never read.

    `share` is a part of the tables, the number of parts, a power of two, and the time: other parts are left alone.
    """
    token_ids, token_logits, pair_keys, pair_ids, pair_logits = arrays[:5]
    triple_keys, triple_ids, triple_logits, times = arrays[5:9]
    first, before, token = path
    part, parts, now = share
    k, others = top[0].shape[1], parts - 1
    if 0 <= token < len(token_ids):
        if token & others == part:
            times[token] = now
            fill_row(token_ids[token], token_logits[token], top, row, k)
        if before >= 0:
            slot = pair_slot(before, token, len(pair_keys))
            if slot & others == part:
                pair_keys[slot] = (np.int64(before) << 32) | token
                times[len(token_ids) + slot] = now
                fill_row(pair_ids[slot], pair_logits[slot], top, row, k)
            if first >= 0:
                key = triple_key(first, before, token)
                slot = key & (len(triple_keys) - 1)
                if slot & others == part:
                    triple_keys[slot] = key
                    times[len(token_ids) + len(pair_keys) + slot] = now
                    fill_row(triple_ids[slot], triple_logits[slot], top, row, k)


@inline_jit
def fill_row(ids, logits, top, row, k):  # type: ignore[no-untyped-def]
    top_ids, top_logits = top
    for j in range(k):
        ids[j], logits[j] = top_ids[row, j], top_logits[row, j]
    if k < len(ids):
        ids[k] = -1


@jit
def store_predictions(arrays, before, tokens, top_ids, top_logits):  # type: ignore[no-untyped-def]
    for i in range(len(tokens)):
        share = 0, 1, arrays[10][0]
        store_prediction(arrays, (-1, before[i], tokens[i]), (top_ids, top_logits), i, share)


@inline_jit
def mark_token(arrays, token):  # type: ignore[no-untyped-def]
    """Note a token that became part of a text."""
    marks, clock = arrays[9], arrays[10]
    clock[1] += 1
    if 0 <= token < len(marks):
        marks[token] = clock[1]


@jit
def learn_rows(arrays, plan, about, top, runner_ups, team):  # type: ignore[no-untyped-def]
    """Store the predictions after all rows of some requests, windows excepted, and set their runner-ups.

    Each thread of a team goes through all rows and fills a part of the tables, so they end as if one had filled them.
    """
    threads, parts = team
    while parts & (parts - 1):  # not a power of two
        parts -= 1
    room = new_merge_room(plan[2].shape[1], parts)
    data = arrays, plan, (about, top, runner_ups, arrays[10][0]), room
    run_parts(threads, parts, job_of(learn_part, data))
    for i in range(len(about)):
        own = plan[0][about[i, 0]]
        arrays[10][0] += 1 if num_predicted(own) + own[NUM_NODES] else 0


@inline_jit
def num_predicted(own):  # type: ignore[no-untyped-def]
    """Return for how many of the last pending rows of a request predictions are learned."""
    return max(own[PREDICT], 1) if own[COMPLETE] else own[PREDICT]


@borrowing_jit
def learn_part(data, part):  # type: ignore[no-untyped-def]
    """Fill a part of the tables, and set the runner-ups of some requests; the first part also marks tokens."""
    arrays, plan, (about, top, runner_ups, now), room = data
    all_about, pending, nodes = plan
    top_ids, top_logits = top
    parts, own_room = len(room.tokens), room_of(room, part)
    for i in range(len(about)):
        place, start, last, emitted, before, first = about[i]
        own = all_about[place]
        predict = num_predicted(own)
        if predict + own[NUM_NODES] == 0:
            continue
        now += 1
        share = part, parts, np.int32(now)
        tokens = pending[own[FIRST_PENDING] : own[FIRST_PENDING] + own[NUM_PENDING]]
        for row in range(len(tokens)):
            previous = tokens[row - 1] if row else before
            earlier = tokens[row - 2] if row > 1 else before if row else first
            if row >= len(tokens) - predict:
                store_prediction(arrays, (earlier, previous, tokens[row]), top, start + row, share)
            if part == 0:
                mark_token(arrays, tokens[row])
        before = tokens[-2] if len(tokens) > 1 else before
        for node in range(own[FIRST_NODE], own[FIRST_NODE] + own[NUM_NODES]):
            parent = nodes[1, node]
            previous, earlier = tokens[-1], before
            if parent >= 0:
                previous, above = nodes[0, own[FIRST_NODE] + parent], nodes[1, own[FIRST_NODE] + parent]
                earlier = nodes[0, own[FIRST_NODE] + above] if above >= 0 else tokens[-1]
            row = start + len(tokens) + node - own[FIRST_NODE]
            store_prediction(arrays, (earlier, previous, nodes[0, node]), top, row, share)
        node = last - start - len(tokens) if part == 0 else -1
        while node >= 0:
            mark_token(arrays, nodes[0, own[FIRST_NODE] + node])
            node = nodes[1, own[FIRST_NODE] + node]
        if i % parts == part:
            set_runner_ups(runner_ups[i], top_ids[last], top_logits[last], emitted)
            off_path = ints_at(longs_at(runner_ups[i], 3)[2], (2, POSITIONS, PER_POSITION))
            tree = nodes[:, own[FIRST_NODE] : own[FIRST_NODE] + own[NUM_NODES]]
            merge_off_path(off_path, tree, top, (start + len(tokens), last - start - len(tokens)), own_room)


@jit
def set_runner_ups(address, top_ids, top_logits, emitted):  # type: ignore[no-untyped-def]
    arrays = longs_at(address, 3)
    tokens, logits = ints_at(arrays[0], SAMPLED_TOP_K - 1), floats_at(arrays[1], SAMPLED_TOP_K - 1)
    left_out = emitted if emitted >= 0 else top_ids[0]
    count, most = 0, len(top_ids) - 1
    for k in range(len(top_ids)):
        if top_ids[k] != left_out and count < most:
            tokens[count], logits[count] = top_ids[k], top_logits[k]
            count += 1
    for k in range(count, SAMPLED_TOP_K - 1):
        tokens[k] = -1


@jit
def read_runner_ups(addresses):  # type: ignore[no-untyped-def]
    """Return the tokens and logits of the runner-ups of several texts, [texts, k], and their off-path predictions."""
    tokens = np.empty((len(addresses), SAMPLED_TOP_K - 1), np.int32)
    logits = np.empty(tokens.shape, np.float32)
    off_path = np.empty((len(addresses), 2, POSITIONS, PER_POSITION), np.int32)
    flat = off_path.reshape(len(addresses), -1)
    for i in range(len(addresses)):
        arrays = longs_at(addresses[i], 3)
        own_tokens, own_logits = ints_at(arrays[0], SAMPLED_TOP_K - 1), floats_at(arrays[1], SAMPLED_TOP_K - 1)
        own_off_path = ints_at(arrays[2], flat.shape[1])
        for j in range(SAMPLED_TOP_K - 1):  # slices would take seconds longer to compile
            tokens[i, j], logits[i, j] = own_tokens[j], own_logits[j]
        for j in range(flat.shape[1]):
            flat[i, j] = own_off_path[j]
    return tokens, logits, off_path
