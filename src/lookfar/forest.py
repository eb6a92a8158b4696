"""Candidate trees for the texts of a batch, grown best first from everything that the sources offer.

Every place of a tree is continued in two ways: by the *drafts* that agree with the path so far, and by the *successors*
that the model predicted after the place's last token or pair of tokens. What two sources offer is one candidate. A
candidate's score is the product of the estimated probabilities along its path, so it never exceeds its parent's, and
the best n candidates always make up trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lookfar.arrays import Floats, Int32s
from lookfar.calibration import (
    AGAINST,
    DEPTH,
    DEPTHS,
    DRAFTS,
    FOR,
    GRADES,
    LEVEL_BOUNDS,
    LEVELS,
    RUNNER,
    RUNNERS,
    SHARES,
    SOURCE,
    TABLE,
    TABLES,
    Calibration,
    learn_along,
)
from lookfar.heap import pop, push
from lookfar.jit import jit
from lookfar.successors import Successors, pair_slot

MAX_CHILDREN = 48  # candidates considered after one place


@dataclass(slots=True)
class Offers:
    """The drafts of all sequences of a batch; those of sequence b are `starts[b] … starts[b + 1]`."""

    drafts: Int32s  # [n, depth] tokens, -1 behind the end
    grades: Int32s  # [n]
    weights: Floats  # [n]
    sources: Int32s  # [n] which source, by its place in the calibration
    starts: Int32s  # [batch + 1]
    roots: Int32s  # [batch, 2] the last two tokens of each text, -1 where there is none
    runners: Int32s  # [batch, k] the tokens that came next to the root's in its own prediction, -1 for none
    limits: Int32s  # [batch] the deepest place that could be accepted


@dataclass(slots=True)
class Forest:
    """All candidates. The first ones, one a sequence, are the roots; children of one place are neighbours."""

    owners: Int32s
    parents: Int32s
    tokens: Int32s
    depths: Int32s
    scores: Floats
    sources: Int32s  # whose drafts speak for it most; one more than there are for what only successors offer
    backers: Int32s  # how many sources offer it
    features: Int32s  # [candidates, features each]
    first_child: Int32s  # -1: not looked at
    child_count: Int32s
    picked: Int32s  # the best candidates, best first

    def teach(self, place: int, emitted: Int32s, calibration: Calibration) -> None:
        """Compare the candidates after a root with what its text went on with."""
        learn_along(
            calibration.weights,
            calibration.squares,
            self.features,
            self.tokens,
            self.first_child,
            self.child_count,
            place,
            emitted,
        )


def grow_forest(
    offers: Offers, successors: Successors, calibration: Calibration, max_nodes: int, room: Int32s, floor: float
) -> Forest:
    """The best candidates for all sequences: at most `max_nodes`, `room[b]` for sequence b, none below `floor`."""
    return Forest(
        *grow(
            offers.drafts,
            offers.grades,
            offers.weights,
            offers.sources,
            offers.starts,
            offers.roots,
            offers.runners,
            offers.limits,
            *successors.arrays,
            calibration.weights,
            len(calibration.sources),
            max_nodes,
            room,
            np.float32(floor),
        )
    )


@jit
def level_of(probability):  # type: ignore[no-untyped-def]
    level = 0
    while level < LEVELS - 1 and probability < LEVEL_BOUNDS[level]:
        level += 1
    return level


@jit
def add_child(children, count, token):  # type: ignore[no-untyped-def]
    """The place of a token among the children, added if new; -1 if there is no room."""
    for i in range(count):
        if children[i] == token:
            return i, count
    if count == MAX_CHILDREN:
        return -1, count
    children[count] = token
    return count, count + 1


@jit
def read_table(ids, logits, children, count, levels):  # type: ignore[no-untyped-def]
    """Add a row of predictions to the children; `levels` gets their levels, 1 + level. Returns the best level too."""
    best = logits[0]
    total = np.float32(0.0)
    for i in range(len(ids)):
        if ids[i] >= 0:
            total += np.exp(logits[i] - best)
    for i in range(len(ids)):
        if ids[i] >= 0:
            child, count = add_child(children, count, ids[i])
            if child >= 0:
                levels[child] = 1 + level_of(np.exp(logits[i] - best) / total)
    return count, level_of(1.0 / total)


@jit
def grow(  # type: ignore[no-untyped-def]
    drafts,
    grades,
    weights,
    sources,
    starts,
    roots,
    runners,
    limits,
    token_ids,
    token_logits,
    pair_keys,
    pair_ids,
    pair_logits,
    log_odds,
    source_count,
    max_nodes,
    room_each,
    floor,
):
    batch = len(roots)
    room = batch + (max_nodes + batch) * MAX_CHILDREN
    width = 4 + source_count  # depth, runner, two tables, sources
    owners = np.empty(room, np.int32)
    parents = np.empty(room, np.int32)
    tokens = np.empty(room, np.int32)
    depths = np.empty(room, np.int32)
    scores = np.empty(room, np.float32)
    best_source = np.empty(room, np.int32)
    backers = np.zeros(room, np.int32)
    features = np.empty((room, width), np.int32)
    first_child = np.full(room, -1, np.int32)
    child_count = np.zeros(room, np.int32)
    low = np.zeros(room, np.int32)  # the drafts that agree with the path so far: order[low:high]
    high = np.zeros(room, np.int32)
    order = np.arange(len(drafts)).astype(np.int32)
    spare = np.empty(len(drafts), np.int32)
    group = np.empty(len(drafts), np.int32)
    picked = np.empty(max_nodes, np.int32)
    picked_each = np.zeros(batch, np.int32)
    heap = np.empty(room, np.int32)
    # What is known of the children of the place at hand.
    children = np.empty(MAX_CHILDREN, np.int32)
    drafted = np.zeros(MAX_CHILDREN, np.int32)  # how many drafts go on with the child
    of_token = np.zeros(MAX_CHILDREN, np.int32)
    of_pair = np.zeros(MAX_CHILDREN, np.int32)
    rank = np.zeros(MAX_CHILDREN, np.int32)
    grade = np.full((MAX_CHILDREN, source_count), -1, np.int32)  # the best grade behind the child, -1 for none
    support = np.zeros((MAX_CHILDREN, source_count), np.float32)  # the weight of those drafts
    present = np.empty((source_count, GRADES), np.float32)  # the weight of all drafts here, by grade

    used = batch
    for b in range(batch):
        owners[b], parents[b], tokens[b], depths[b], scores[b] = b, -1, roots[b, 1], 0, 1.0
        best_source[b] = source_count
        low[b], high[b] = starts[b], starts[b + 1]
    heap_size, picks, next_root = 0, 0, 0
    while True:
        if next_root < batch:
            place = next_root
            next_root += 1
        else:
            if heap_size == 0 or picks == max_nodes:
                break
            place, heap_size = pop(heap, heap_size, scores)
            if picked_each[owners[place]] == room_each[owners[place]]:
                continue
            picked[picks] = place
            picks += 1
            picked_each[owners[place]] += 1
        b, depth = owners[place], depths[place]
        if depth >= limits[b]:
            continue
        # Children: the tokens that the drafts go on with …
        count = 0
        present[:] = 0
        for i in range(low[place], high[place]):
            draft = order[i]
            token = drafts[draft, depth] if depth < drafts.shape[1] else -1
            group[i] = -1
            if token < 0:
                continue
            child, count = add_child(children, count, token)
            source, g, weight = sources[draft], grades[draft], weights[draft]
            present[source, g] += weight
            if child < 0:
                continue
            group[i] = child
            drafted[child] += 1
            if g > grade[child, source]:
                grade[child, source] = g
                support[child, source] = weight
            elif g == grade[child, source]:
                support[child, source] += weight
        with_drafts = count
        # … and what the model predicted here before.
        best_of_token, best_of_pair = -1, -1
        last = tokens[place]
        before = roots[b, 0] if place < batch else tokens[parents[place]]
        if len(pair_keys) and before >= 0:
            slot = pair_slot(before, last, len(pair_keys))
            if pair_keys[slot] == (np.int64(before) << 32) | last:
                count, best_of_pair = read_table(pair_ids[slot], pair_logits[slot], children, count, of_pair)
        if last < len(token_ids) and token_ids[last, 0] >= 0:
            count, best_of_token = read_table(token_ids[last], token_logits[last], children, count, of_token)
        if place < batch:
            for i in range(runners.shape[1]):
                if runners[b, i] >= 0:
                    child, count = add_child(children, count, runners[b, i])
                    if child >= 0:
                        rank[child] = min(i + 1, RUNNERS - 1)
        # Sort this place's drafts by child, so that each child has a stretch of `order`.
        start = low[place]
        for child in range(with_drafts):
            low[used + child] = start
            start += drafted[child]
            high[used + child] = low[used + child]
        for i in range(low[place], high[place]):
            if group[i] >= 0:
                spare[high[used + group[i]]] = order[i]
                high[used + group[i]] += 1
        for i in range(low[place], start):
            order[i] = spare[i]
        first_child[place], child_count[place] = used, count
        for child in range(count):
            new = used + child
            owners[new], parents[new], tokens[new], depths[new] = b, place, children[child], depth + 1
            if child >= with_drafts:
                low[new], high[new] = 0, 0
            mine = features[new]
            mine[0] = DEPTH + min(depth, DEPTHS - 1)
            mine[1] = RUNNER + rank[child]
            mine[2] = TABLES + (of_token[child] if of_token[child] or best_of_token < 0 else 1 + LEVELS + best_of_token)
            mine[3] = (
                TABLES + TABLE + (of_pair[child] if of_pair[child] or best_of_pair < 0 else 1 + LEVELS + best_of_pair)
            )
            chosen, most = source_count, np.float32(-100.0)
            backers[new] = min(rank[child] + of_token[child] + of_pair[child], 1)
            for source in range(source_count):
                best = GRADES - 1
                while best >= 0 and present[source, best] == 0:
                    best -= 1
                own = grade[child, source]
                feature = 0
                if own >= 0:
                    part = support[child, source] / present[source, own]
                    share = 0 if part < 0.35 else 1 if part < 0.7 else 2
                    feature = FOR + (own * SHARES + share) * 2 + (1 if own == best else 0)
                    backers[new] += 1
                elif best >= 0:
                    feature = AGAINST + best
                mine[4 + source] = DRAFTS + source * SOURCE + feature
                if own >= 0 and log_odds[mine[4 + source]] > most:
                    chosen, most = source, log_odds[mine[4 + source]]
            best_source[new] = chosen
            total = np.float32(0.0)
            for feature in mine:
                total += log_odds[feature]
            scores[new] = scores[place] / (1.0 + np.exp(-total))
            if scores[new] >= floor:
                heap_size = push(heap, heap_size, scores, new)
            # A clean slate for the next place.
            drafted[child], of_token[child], of_pair[child], rank[child] = 0, 0, 0, 0
            for source in range(source_count):
                grade[child, source], support[child, source] = -1, 0
        used += count
    return (
        owners[:used],
        parents[:used],
        tokens[:used],
        depths[:used],
        scores[:used],
        best_source[:used],
        backers[:used],
        features[:used],
        first_child[:used],
        child_count[:used],
        picked[:picks],
    )
