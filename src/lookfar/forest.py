"""Candidate trees for the texts of a batch, grown best first from everything that the sources offer.

Every place of a tree is continued in two ways: by the *drafts* that agree with the path so far, and by the *successors*
that the model predicted after the place's last token or pair of tokens. What two sources offer is one candidate. A
candidate's score is the product of the estimated probabilities along its path, so it never exceeds its parent's, and
the best n candidates always make up trees.

Under sampling a token is argmax(p / noise), and the noise of the next places is known (see noise.py): remembered logits
are compared after it was applied to them, and how lucky a token is counts for every candidate.
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
    LUCK,
    LUCK_BOUNDS,
    LUCK_LEVELS,
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
from lookfar.successors import SAMPLED_TOP, TOP, Successors, pair_slot

ONE = np.float32(1.0)  # in compiled code a literal would make the sums around it double, which takes a fifth longer
HOPELESS = 0.005  # predictions that the noise leaves less of the probability than this are no candidates
MAX_CHILDREN = 48  # candidates considered after one place

# Columns of the table of candidates. LOW and HIGH bound the drafts that agree with the path, in an order of all drafts.
OWNER, PARENT, TOKEN, DEEP, LOUDEST, BACKERS, FIRST, COUNT, LOW, HIGH = range(10)
COLUMNS = 10
# Columns of the slate, where the children of the place at hand stand until they are candidates: how many drafts go on
# with the child, 1 + the level of its probability after the token and after the pair, its rank among the runners-up.
CHILD, DRAFTED, OF_TOKEN, OF_PAIR, RANK = range(5)


@dataclass(slots=True)
class Luck:
    """What is known of the noise to come."""

    coming: Floats  # [rows, places modulo their number, vocabulary]; half as many as there is room for are known
    rows: Int32s  # [batch] the row of each sequence, -1 if nothing is known for it
    heads: Int32s  # [batch] the place of its next token
    heats: Floats  # [batch] its temperature

    @classmethod
    def unknown(cls, batch: int) -> Luck:
        """Nothing is sampled, or nothing is known of it."""
        nobody, start = np.full(batch, -1, np.int32), np.zeros(batch, np.int32)
        return cls(np.zeros((0, 0, 0), np.float32), nobody, start, np.ones(batch, np.float32))


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
    runner_logits: Floats  # [batch, k]
    luck: Luck
    limits: Int32s  # [batch] the deepest place that could be accepted


@dataclass(slots=True)
class Forest:
    """All candidates. The first ones, one a sequence, are the roots; children of one place are neighbours."""

    nodes: Int32s  # [candidates, columns]
    scores: Floats
    features: Int32s  # [candidates, features each]
    picked: Int32s  # the best candidates, best first

    @property
    def owners(self) -> Int32s:
        return self.nodes[:, OWNER]

    @property
    def parents(self) -> Int32s:
        return self.nodes[:, PARENT]

    @property
    def tokens(self) -> Int32s:
        return self.nodes[:, TOKEN]

    @property
    def depths(self) -> Int32s:
        return self.nodes[:, DEEP]

    @property
    def sources(self) -> Int32s:
        """Whose drafts speak for a candidate most; one more than there are for what only successors offer."""
        return self.nodes[:, LOUDEST]

    @property
    def backers(self) -> Int32s:
        """How many sources offer a candidate."""
        return self.nodes[:, BACKERS]

    def teach(self, root: int, emitted: Int32s, calibration: Calibration) -> None:
        """Compare the candidates after a root with what its text went on with."""
        first, count = self.nodes[:, FIRST], self.nodes[:, COUNT]
        known = calibration.weights, calibration.squares
        learn_along(*known, self.features, self.tokens, first, count, root, emitted)


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
            offers.runner_logits,
            offers.luck.coming,
            offers.luck.rows,
            offers.luck.heads,
            offers.luck.heats,
            offers.limits,
            *successors.tables,
            calibration.weights,
            len(calibration.sources),
            max_nodes,
            room,
            np.float32(floor),
        )
    )


@jit
def grow(  # type: ignore[no-untyped-def]
    drafts,
    grades,
    weights,
    sources,
    starts,
    roots,
    runners,
    runner_logits,
    coming,
    luck_rows,
    heads,
    heats,
    limits,
    token_ids,
    token_logits,
    pair_keys,
    pair_ids,
    pair_logits,
    log_odds,
    source_count,
    max_nodes,
    room,
    floor,
):
    batch = len(roots)
    size = batch + (max_nodes + batch) * MAX_CHILDREN
    nodes, scores = np.empty((size, COLUMNS), np.int32), np.empty(size, np.float32)
    # depth, runner-up, token, pair, luck if there is any, and each source
    lucky = 1 if luck_rows.max() >= 0 and coming.shape[1] > 0 else 0
    features = np.empty((size, 4 + lucky + source_count), np.int32)
    unknown, chances = np.empty(0, np.float32), np.empty(SAMPLED_TOP, np.float32)
    heap, picked, taken = np.empty(size, np.int32), np.empty(max_nodes, np.int32), np.zeros(batch, np.int32)
    order = np.arange(len(drafts)).astype(np.int32)
    spare, group = np.empty_like(order), np.empty_like(order)
    slate = np.zeros((MAX_CHILDREN, 5), np.int32)
    grade = np.full((MAX_CHILDREN, source_count), -1, np.int32)  # the best grade behind a child, -1 for none
    support = np.zeros((MAX_CHILDREN, source_count), np.float32)  # the weight of those drafts
    present = np.zeros((source_count, GRADES), np.float32)  # the weight of all drafts at the place
    best_grade = np.empty(source_count, np.int32)  # of those, -1 if there are none
    for b in range(batch):
        plant(nodes, scores, b, b, -1, roots[b, 1], 0, 1.0)
        nodes[b, LOW], nodes[b, HIGH] = starts[b], starts[b + 1]
    used, heap_size, picks, next_root = batch, 0, 0, 0
    while next_root < batch or (heap_size and picks < max_nodes):
        if next_root < batch:  # the roots are looked at first, whatever they promise
            place = next_root
            next_root += 1
        else:
            place, heap_size = pop(heap, heap_size, scores)
            owner = nodes[place, OWNER]
            if taken[owner] == room[owner]:
                continue
            picked[picks] = place
            picks += 1
            taken[owner] += 1
        b = nodes[place, OWNER]
        if nodes[place, DEEP] >= limits[b]:
            continue
        count = read_drafts(
            drafts, grades, weights, sources, order, group, nodes, place, slate, grade, support, present
        )
        sort_drafts(order, spare, group, nodes, place, used, slate, count)
        drafted = count
        noise, depth, heat = unknown, nodes[place, DEEP], heats[b]
        if lucky and luck_rows[b] >= 0 and depth < coming.shape[1] // 2:
            noise = coming[luck_rows[b], (heads[b] + depth) % coming.shape[1]]
        last, parent = nodes[place, TOKEN], nodes[place, PARENT]
        before = nodes[parent, TOKEN] if parent >= 0 else roots[b, 0]
        slot = find_pair(pair_keys, before, last)
        count, best_of_pair = read_table(pair_ids, pair_logits, slot, slate, count, OF_PAIR, heat, noise, chances)
        row = last if last < len(token_ids) else -1
        count, best_of_token = read_table(token_ids, token_logits, row, slate, count, OF_TOKEN, heat, noise, chances)
        if parent < 0:
            count = read_runners(runners, runner_logits, b, slate, count, heat, noise)
        nodes[place, FIRST], nodes[place, COUNT] = used, count
        for source in range(source_count):
            best_grade[source] = GRADES - 1
            while best_grade[source] >= 0 and present[source, best_grade[source]] == 0:
                best_grade[source] -= 1
        for child in range(count):
            new = used + child
            total = describe(features[new], slate, child, depth, best_of_token, best_of_pair, log_odds)
            if lucky:
                features[new, 4] = luck_feature(slate, child, noise)
                total += log_odds[features[new, 4]]
            total += weigh(
                features[new, 4 + lucky :], nodes, new, slate, child, grade, support, present, best_grade, log_odds
            )
            plant(nodes, scores, new, b, place, slate[child, CHILD], depth + 1, 0.0)
            if child >= drafted:
                nodes[new, LOW] = nodes[new, HIGH] = 0
            scores[new] = scores[place] / (ONE + np.exp(-total))
            if scores[new] >= floor:
                heap_size = push(heap, heap_size, scores, new)
            slate[child, DRAFTED:] = 0
        used += count
    return nodes[:used], scores[:used], features[:used], picked[:picks]


@jit
def cut(nodes, scores, picked, batch):  # type: ignore[no-untyped-def]
    """The picked candidates as trees, one behind the other: columns (token, parent, depth, source, backers), scores,
    and where the tree of each sequence begins."""
    starts, place = np.zeros(batch + 1, np.int32), np.full(len(nodes), -1, np.int32)
    for node in picked:
        place[node] = starts[nodes[node, OWNER] + 1]  # in its own tree
        starts[nodes[node, OWNER] + 1] += 1
    for owner in range(batch):
        starts[owner + 1] += starts[owner]
    columns, chances = np.empty((5, len(picked)), np.int32), np.empty(len(picked), np.float32)
    for node in picked:
        at = starts[nodes[node, OWNER]] + place[node]
        columns[0, at], columns[1, at] = nodes[node, TOKEN], place[nodes[node, PARENT]]
        columns[2, at], columns[3, at] = nodes[node, DEEP], nodes[node, LOUDEST]
        columns[4, at], chances[at] = nodes[node, BACKERS], scores[node]
    return columns, chances, starts


@jit
def plant(nodes, scores, node, owner, parent, token, depth, score):  # type: ignore[no-untyped-def]
    nodes[node, OWNER], nodes[node, PARENT], nodes[node, TOKEN], nodes[node, DEEP] = owner, parent, token, depth
    nodes[node, FIRST], nodes[node, COUNT] = -1, 0
    scores[node] = score


@jit
def add_child(slate, count, token):  # type: ignore[no-untyped-def]
    """The place of a token among the children, added if new; -1 if there is no room."""
    for i in range(count):
        if slate[i, CHILD] == token:
            return i, count
    if count == MAX_CHILDREN:
        return -1, count
    slate[count, CHILD] = token
    return count, count + 1


@jit
def read_drafts(  # type: ignore[no-untyped-def]
    drafts, grades, weights, sources, order, group, nodes, place, slate, grade, support, present
):
    """Read the tokens that a place's drafts go on with; `group` gets which child each draft belongs to."""
    present[:] = 0
    count, depth = 0, nodes[place, DEEP]
    for i in range(nodes[place, LOW], nodes[place, HIGH]):
        draft = order[i]
        token = drafts[draft, depth] if depth < drafts.shape[1] else -1
        group[i] = -1
        if token < 0:
            continue
        child, count = add_child(slate, count, token)
        source, own, weight = sources[draft], grades[draft], weights[draft]
        present[source, own] += weight
        if child < 0:
            continue
        group[i] = child
        slate[child, DRAFTED] += 1
        if own > grade[child, source]:
            grade[child, source], support[child, source] = own, weight
        elif own == grade[child, source]:
            support[child, source] += weight
    return count


@jit
def sort_drafts(order, spare, group, nodes, place, used, slate, count):  # type: ignore[no-untyped-def]
    """Sort a place's drafts by child, so that each child has a stretch of `order`."""
    low, start = nodes[place, LOW], nodes[place, LOW]
    for child in range(count):
        nodes[used + child, LOW] = nodes[used + child, HIGH] = start
        start += slate[child, DRAFTED]
    for i in range(low, nodes[place, HIGH]):
        if group[i] >= 0:
            spare[nodes[used + group[i], HIGH]] = order[i]
            nodes[used + group[i], HIGH] += 1
    for i in range(low, start):
        order[i] = spare[i]


@jit
def find_pair(keys, before, last):  # type: ignore[no-untyped-def]
    """The slot of a pair of tokens, -1 if nothing is known of it."""
    if before < 0 or not len(keys):
        return -1
    slot = pair_slot(before, last, len(keys))
    return slot if keys[slot] == (np.int64(before) << 32) | last else -1


@jit
def worth(token, logit, heat, noise):  # type: ignore[no-untyped-def]
    """A logit after temperature and noise: whoever has the highest is drawn."""
    value = logit / heat
    return value - np.log(noise[token]) if token < len(noise) else value


@jit
def read_table(ids, logits, row, slate, count, column, heat, noise, chances):  # type: ignore[no-untyped-def]
    """Add a row of predictions to the children with their levels. Returns the best level too; -1: nothing is known."""
    if row < 0 or ids[row, 0] < 0:
        return count, -1
    best, total, width = np.float32(-np.inf), np.float32(0.0), 0
    most = ids.shape[1] if len(noise) else min(TOP, ids.shape[1])
    while width < most and ids[row, width] >= 0:
        chances[width] = worth(ids[row, width], logits[row, width], heat, noise)
        best = max(best, chances[width])
        width += 1
    for i in range(width):
        chances[i] = np.exp(chances[i] - best)
        total += chances[i]
    for i in range(width):
        share = chances[i] / total
        if len(noise) and share < HOPELESS:
            continue
        child, count = add_child(slate, count, ids[row, i])
        if child >= 0:
            slate[child, column] = 1 + level_of(share)
    return count, level_of(ONE / total)


@jit
def level_of(probability):  # type: ignore[no-untyped-def]
    level = 0
    while level < LEVELS - 1 and probability < LEVEL_BOUNDS[level]:
        level += 1
    return level


@jit
def read_runners(runners, logits, b, slate, count, heat, noise):  # type: ignore[no-untyped-def]
    """Add the runners-up of a root to its children, each with its rank."""
    for i in range(runners.shape[1]):
        rank = i
        if runners[b, i] >= 0 and len(noise):
            rank, own = 0, worth(runners[b, i], logits[b, i], heat, noise)
            for j in range(runners.shape[1]):
                if runners[b, j] >= 0 and worth(runners[b, j], logits[b, j], heat, noise) > own:
                    rank += 1
        if runners[b, i] >= 0 and rank < TOP:
            child, count = add_child(slate, count, runners[b, i])
            if child >= 0:
                slate[child, RANK] = min(rank + 1, RUNNERS - 1)
    return count


@jit
def luck_feature(slate, child, noise):  # type: ignore[no-untyped-def]
    """How lucky a child is, apart for those whose level already says so."""
    token = slate[child, CHILD]
    if token >= len(noise):
        return LUCK
    level = 0
    while level < LUCK_LEVELS - 1 and noise[token] > LUCK_BOUNDS[level]:
        level += 1
    counted = slate[child, OF_TOKEN] + slate[child, OF_PAIR] > 0
    return LUCK + 1 + level + (LUCK_LEVELS if counted else 0)


@jit
def describe(mine, slate, child, depth, best_of_token, best_of_pair, log_odds):  # type: ignore[no-untyped-def]
    """The features that do not come from drafts; returns their log-odds."""
    of_token, of_pair = slate[child, OF_TOKEN], slate[child, OF_PAIR]
    mine[0] = DEPTH + min(depth, DEPTHS - 1)
    mine[1] = RUNNER + slate[child, RANK]
    mine[2] = TABLES + (of_token if of_token or best_of_token < 0 else 1 + LEVELS + best_of_token)
    mine[3] = TABLES + TABLE + (of_pair if of_pair or best_of_pair < 0 else 1 + LEVELS + best_of_pair)
    return log_odds[mine[0]] + log_odds[mine[1]] + log_odds[mine[2]] + log_odds[mine[3]]


@jit
def weigh(  # type: ignore[no-untyped-def]
    mine, nodes, new, slate, child, grade, support, present, best_grade, log_odds
):
    """The features that come from drafts, and who speaks for the child most; returns their log-odds."""
    total, loudest = np.float32(0.0), np.float32(-np.inf)
    nodes[new, LOUDEST] = grade.shape[1]
    nodes[new, BACKERS] = min(slate[child, RANK] + slate[child, OF_TOKEN] + slate[child, OF_PAIR], 1)
    for source in range(grade.shape[1]):
        best, own = best_grade[source], grade[child, source]
        said = AGAINST + best if best >= 0 else 0
        if own >= 0:
            part = support[child, source] / present[source, own]
            share = 0 if part < 0.35 else 1 if part < 0.7 else 2
            said = FOR + (own * SHARES + share) * 2 + (1 if own == best else 0)
        feature = DRAFTS + source * SOURCE + said
        mine[source] = feature
        total += log_odds[feature]
        if own >= 0:
            nodes[new, BACKERS] += 1
            if log_odds[feature] > loudest:
                nodes[new, LOUDEST], loudest = source, log_odds[feature]
        grade[child, source], support[child, source] = -1, 0
    return total
