"""The evidence for the children of one node: which tokens its sources propose, and the features of each.

Compiled code, for one node at a time. Functions that run for every node are compiled into `tree_builder.build`: a call
would count the references of every array in its tuples, which takes as long as the work itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.atomics import CACHE_LINE
from lookfar.core.jit import inline_jit, jit
from lookfar.retrieval.off_path import KINDS, TOKENS
from lookfar.retrieval.recycle_table import NO_CONTEXT, TOP_K, find_pair, find_triple
from lookfar.speculation.acceptance import (
    AGAINST,
    CROSSED,
    CROSSES,
    DEPTH,
    DEPTHS,
    DRAFTS,
    FOR,
    LEVEL_BOUNDS,
    LEVELS,
    MAX_CHILDREN,
    NOISE,
    NOISE_BOUNDS,
    NOISE_LEVELS,
    OFF_PATH,
    OFF_PATH_KINDS,
    ONE,
    RUNNER_UP,
    RUNNER_UPS,
    SCORES,
    SEEN,
    SEEN_AGES,
    SHARES,
    SOURCE,
    STATES,
    TABLE,
    TABLES,
)

MIN_SHARE = 0.005  # predictions that the noise leaves less of the probability than this are no candidates
BITS: Int32s = np.array([1 + age.bit_length() for age in range(256)], np.int32)  # 1 + the length of a number in bits

# Columns of the child table: how many drafts continue with the child, 1 + the level of its probability after the token,
# the pair and the triple, 1 + its rank among the runner-ups; 0 for none. Then the source with the strongest evidence
# (one past the last for none), and how many sources propose the child, with recycled predictions and runner-ups as one.
DRAFTED, OF_TOKEN, OF_PAIR, OF_TRIPLE, RANK, OFF, BEST_SOURCE, PROPOSED_BY = range(8)
NO_CHILD = np.int32(-1)
LINE = CACHE_LINE // 4  # numbers on a cache line
OWN_FEATURES = 9  # beside noise and sources


class Children(NamedTuple):
    """The children of one node and the evidence for them."""

    tokens: Int32s  # [MAX_CHILDREN] -1 behind the last child
    child_table: Int32s  # [MAX_CHILDREN, columns]
    match: Int32s  # [MAX_CHILDREN, sources] the best match score behind a child, -1 for none
    support: Floats  # [MAX_CHILDREN, sources] the weight of the drafts with that score
    present: Floats  # [sources or more, SCORES] the weight of all drafts at the node
    best: Int32s  # [sources or more] the best match score at the node, -1 for none
    chances: Floats  # [k] probabilities of one row of a table
    log_odds: Floats  # [MAX_CHILDREN] of acceptance


@inline_jit
def new_children(source_count, k, parts):  # type: ignore[no-untyped-def]
    """Return room for the children of one node in each part of a build, on cache lines of their own."""
    return Children(
        np.full((parts, MAX_CHILDREN), NO_CHILD),
        np.zeros((parts, MAX_CHILDREN, 8), np.int32),
        np.full((parts, MAX_CHILDREN, source_count), -1, np.int32),
        np.zeros((parts, MAX_CHILDREN, source_count), np.float32),
        np.zeros((parts, source_count + 1, SCORES), np.float32),
        np.empty((parts, source_count + 2 * LINE), np.int32),
        np.empty((parts, k + 2 * LINE), np.float32),
        np.empty((parts, MAX_CHILDREN), np.float32),
    )


@inline_jit
def children_of(children, part):  # type: ignore[no-untyped-def]
    """Return the room of one part."""
    return Children(
        children.tokens[part],
        children.child_table[part],
        children.match[part],
        children.support[part],
        children.present[part],
        children.best[part],
        children.chances[part],
        children.log_odds[part],
    )


@jit
def add_child(tokens, count, token):  # type: ignore[no-untyped-def]
    """Return the index of a token among the children, added if it is new (-1 if there is no room), and the count."""
    wanted, place = np.int32(token), np.int32(0)
    for i in range(MAX_CHILDREN):  # all of them, in a few vector instructions and without a branch to predict
        place += np.int32(i + 1) if tokens[i] == wanted else np.int32(0)
    if place or count == MAX_CHILDREN:
        return np.int64(place) - 1, count
    tokens[count] = token
    return count, count + 1


@inline_jit
def read_drafts(drafts, agreeing, group, depth, vocab_size, children):  # type: ignore[no-untyped-def]
    """Read the tokens at `depth` of the drafts that agree with a node's path.

    `group` gets the child that each of those drafts belongs to, -1 for none. Returns the number of children.
    """
    child_tokens, child_table, match, support, present, best_scores, _, _ = children
    tokens, scores, weights, sources, _ = drafts
    for source in range(present.shape[0]):
        for score in range(SCORES):
            present[source, score] = 0
    count = 0
    for i in range(len(agreeing)):
        draft = agreeing[i]
        token = tokens[draft, depth] if depth < tokens.shape[1] else -1
        group[i] = -1
        if token < 0 or token >= vocab_size:
            continue
        child, count = add_child(child_tokens, count, token)
        source, weight = sources[draft], weights[draft]
        score = min(max(scores[draft], 0), SCORES - 1)
        present[source, score] += weight
        if child < 0:
            continue
        group[i] = child
        child_table[child, DRAFTED] += 1
        if score > match[child, source]:
            match[child, source], support[child, source] = score, weight
        elif score == match[child, source]:
            support[child, source] += weight
    for source in range(match.shape[1]):
        best = SCORES - 1
        while best >= 0 and present[source, best] == 0:
            best -= 1
        best_scores[source] = best
    return count


@jit
def noisy_logit(token, logit, noise, temperature):  # type: ignore[no-untyped-def]
    """Return a logit after temperature and noise; the token with the highest one is sampled."""
    value = logit / temperature
    return value - np.log(noise[token]) if token < len(noise) else value


@inline_jit
def read_table(row, children, count, column, sampling, limits):  # type: ignore[no-untyped-def]
    """Add a row of recycled predictions to the children, with the levels of their probabilities.

    `sampling` is the noise of the position (empty if unknown) and the temperature; `limits` are the least probability
    of a child and the size of the vocabulary. Returns the number of children and the level of the most likely one.
    """
    min_share, vocab_size = limits
    ids, logits = row
    noise, temperature = sampling
    tokens, child_table, _, _, _, _, chances, _ = children
    highest, total, width = np.float32(-np.inf), np.float32(0.0), 0
    most = len(ids) if len(noise) else min(TOP_K, len(ids))
    while width < most and ids[width] >= 0:
        chances[width] = noisy_logit(ids[width], logits[width], noise, temperature)
        highest = max(highest, chances[width])
        width += 1
    for i in range(width):
        chances[i] = np.exp(chances[i] - highest)
        total += chances[i]
    for i in range(width):
        share = chances[i] / total
        if ids[i] >= vocab_size or share < min_share or (len(noise) and share < MIN_SHARE):
            continue
        child, count = add_child(tokens, count, ids[i])
        if child >= 0:
            child_table[child, column] = 1 + level_of(share)
    return count, level_of(ONE / total)


@inline_jit
def read_tables(table, path, children, count, sampling, limits):  # type: ignore[no-untyped-def]
    """Add the recycled predictions after the last three tokens, the last two, and the last one of a path.

    Returns the number of children, the level of the best prediction after the token, the pair and the triple, -1 for
    none, and the ages of these rows.
    """
    earlier, before, last = path
    pairs, triples = len(table.token_ids), len(table.token_ids) + len(table.pair_keys)
    of_token, of_pair, of_triple, token_age, pair_age, triple_age, now = -1, -1, -1, 0, 0, 0, table.clock[0]
    slot = find_triple(table.triple_keys, earlier, before, last)
    if slot >= 0 and table.triple_ids[slot, 0] >= 0:
        row = table.triple_ids[slot], table.triple_logits[slot]
        triple_age = age_of(table.times[triples + slot], now)
        count, of_triple = read_table(row, children, count, OF_TRIPLE, sampling, limits)
    slot = find_pair(table.pair_keys, before, last)
    if slot >= 0 and table.pair_ids[slot, 0] >= 0:
        row = table.pair_ids[slot], table.pair_logits[slot]
        pair_age = age_of(table.times[pairs + slot], now)
        count, of_pair = read_table(row, children, count, OF_PAIR, sampling, limits)
    if last < len(table.token_ids) and table.token_ids[last, 0] >= 0:
        row = table.token_ids[last], table.token_logits[last]
        token_age = age_of(table.times[last], now)
        count, of_token = read_table(row, children, count, OF_TOKEN, sampling, limits)
    return count, (of_token, of_pair, of_triple, token_age, pair_age, triple_age)


@jit
def age_of(time, now):  # type: ignore[no-untyped-def]
    """Return how old a row of a table is: of the last step, of the last few, of this text, older, of the prior."""
    age = now - time  # negative after an overflow
    if time == NO_CONTEXT:
        return 4
    return 3 if age < 0 or age > 48 else 0 if age <= 1 else 1 if age <= 6 else 2


@jit
def level_of(probability):  # type: ignore[no-untyped-def]
    level = 0
    for bound in LEVEL_BOUNDS:  # all of them: no branch to predict
        level += probability < bound
    return level


@inline_jit
def read_runner_ups(row, children, count, sampling, vocab_size):  # type: ignore[no-untyped-def]
    """Add the runner-ups of the last token to the children of a root, each with its rank."""
    tokens, logits = row
    noise, temperature = sampling
    for i in range(len(tokens)):
        rank = i
        if tokens[i] >= 0 and len(noise):
            rank, own = 0, noisy_logit(tokens[i], logits[i], noise, temperature)
            for j in range(len(tokens)):
                if tokens[j] >= 0 and noisy_logit(tokens[j], logits[j], noise, temperature) > own:
                    rank += 1
        if 0 <= tokens[i] < vocab_size and rank < TOP_K:
            child, count = add_child(children.tokens, count, tokens[i])
            if child >= 0:
                children.child_table[child, RANK] = min(rank + 1, RUNNER_UPS - 1)
    return count


@inline_jit
def read_off_path(off_path, place, children, count, vocab_size):  # type: ignore[no-untyped-def]
    """Add the predictions of the last step that were made for a position off the accepted path.

    `place` is the request and the position.
    """
    request, position = place
    for i in range(off_path.shape[3]):
        token, kind = off_path[request, TOKENS, position, i], off_path[request, KINDS, position, i]
        if not kind:
            break
        if token < vocab_size:
            child, count = add_child(children.tokens, count, token)
            if child >= 0:
                children.child_table[child, OFF] = kind
    return count


@jit
def noise_feature(token, predicted, noise):  # type: ignore[no-untyped-def]
    """Return the feature for how much the noise favours a child; apart for those whose level already includes it."""
    if token >= len(noise):
        return NOISE
    level = 0
    while level < NOISE_LEVELS - 1 and noise[token] > NOISE_BOUNDS[level]:
        level += 1
    return NOISE + 1 + level + (NOISE_LEVELS if predicted else 0)


@jit
def state_of(level, best):  # type: ignore[no-untyped-def]
    """Return what a table says of a child: `level` is 1 + its level, 0 for none, `best` that of the best prediction."""
    return level if level or best < 0 else 1 + LEVELS + best


@jit
def mark_age(mark, now):  # type: ignore[no-untyped-def]
    """Return how long ago a token was marked, by powers of two; 0: never."""
    age = now - mark
    if not mark:
        return 0
    if age < 256:
        return BITS[age] if age >= 0 else SEEN_AGES - 1  # negative after an overflow
    return min(BITS[min(age >> 8, 255)] + 8, SEEN_AGES - 1)


@inline_jit
def weigh_children(children, count, node, known, weights, features):  # type: ignore[no-untyped-def]
    """Set the features of all children of a node and their log-odds, and clear their evidence for the next node.

    `node` is its depth and what `read_tables` returned; `known` is the table, and the noise of the position.
    """
    tokens, child_table, match, support, present, best_scores, _, log_odds = children
    depth, best_of_token, best_of_pair, best_of_triple, token_age, pair_age, triple_age = node
    table, noise = known
    marks, now = table.marks, table.clock[1]
    source_count = match.shape[1]
    own_features = features.shape[1] - source_count
    for child in range(count):
        of_token = state_of(child_table[child, OF_TOKEN], best_of_token)
        of_pair = state_of(child_table[child, OF_PAIR], best_of_pair)
        of_triple = state_of(child_table[child, OF_TRIPLE], best_of_triple)
        token = tokens[child]
        features[child, 0] = DEPTH + min(depth, DEPTHS - 1)
        features[child, 1] = RUNNER_UP + child_table[child, RANK]
        features[child, 2] = TABLES + token_age * STATES + of_token
        features[child, 3] = TABLES + TABLE + pair_age * STATES + of_pair
        features[child, 4] = TABLES + 2 * TABLE + triple_age * STATES + of_triple
        of_token, of_pair, of_triple = min(of_token, LEVELS + 1), min(of_pair, LEVELS + 1), min(of_triple, LEVELS + 1)
        features[child, 5] = CROSSES + of_token * CROSSED + of_pair
        features[child, 6] = CROSSES + CROSSED * CROSSED + of_pair * CROSSED + of_triple
        features[child, 7] = SEEN + (mark_age(marks[token], now) if token < len(marks) else 0)
        features[child, 8] = OFF_PATH + (OFF_PATH_KINDS if depth else 0) + child_table[child, OFF]
        predicted = child_table[child, OF_TOKEN] + child_table[child, OF_PAIR] + child_table[child, OF_TRIPLE]
        if own_features > OWN_FEATURES:
            features[child, OWN_FEATURES] = noise_feature(token, predicted > 0, noise)
        total, strongest, best_source = np.float32(0.0), np.float32(-np.inf), source_count
        for i in range(own_features):
            total += weights[features[child, i]]
        proposed_by = min(child_table[child, RANK] + child_table[child, OFF] + predicted, 1)
        for source in range(source_count):
            best, own = best_scores[source], match[child, source]
            kind = AGAINST + best if best >= 0 else 0
            if own >= 0:
                part = support[child, source] / present[source, own]
                share = 0 if part < 0.35 else 1 if part < 0.7 else 2
                kind = FOR + (own * SHARES + share) * 2 + (1 if own == best else 0)
            feature = DRAFTS + source * SOURCE + kind
            features[child, own_features + source] = feature
            total += weights[feature]
            if own >= 0:
                proposed_by += 1
                if weights[feature] > strongest:
                    best_source, strongest = source, weights[feature]
            match[child, source], support[child, source] = -1, 0
        for column in range(BEST_SOURCE):
            child_table[child, column] = 0
        child_table[child, BEST_SOURCE], child_table[child, PROPOSED_BY] = best_source, proposed_by
        log_odds[child] = total
