"""Candidates for draft trees, and the arrays that they are built from.

Everything is an array for all requests of a step, because compiled code reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.core.tree import DraftTrees
from lookfar.speculation.acceptance import AcceptanceModel, learn_along_path

# Columns of the table of candidates. FIRST and COUNT are a candidate's children. LOW and HIGH bound the drafts that
# agree with its path, in an order of all drafts.
OWNER, PARENT, TOKEN, DEPTH, TOP_SOURCE, NUM_SOURCES, FIRST, COUNT, LOW, HIGH = range(10)
COLUMNS = 10
# Columns about a root: its last two tokens, the deepest node, its place in the step, and the token before, if known.
BEFORE, LAST, MAX_DEPTH, PLACE, EARLIER = range(5)


class DraftArrays(NamedTuple):
    """The drafts of all requests."""

    tokens: Int32s  # [n, depth] -1 behind the end of a draft
    scores: Int32s  # [n] match scores
    weights: Floats  # [n]
    sources: Int32s  # [n] index into the sources of the acceptance model
    owners: Int32s  # [n] the request of each

    def select(self, chosen: Ints) -> DraftArrays:
        """Return some of the drafts."""
        return DraftArrays._make(array[chosen] for array in self)


class RootArrays(NamedTuple):
    """Where the trees of all requests begin."""

    about: Int32s  # [batch, 4 or 5] the columns above
    runner_ups: Int32s  # [batch, k] alternatives to the last token, -1 for none
    runner_up_logits: Floats  # [batch, k]
    off_path: Int32s  # [batch, 2, positions, k] predictions of the last step on branches that were not accepted
    urgency: Floats  # [batch] how much a token of each request counts


class NoiseArrays(NamedTuple):
    """What is known about the sampling noise of the next positions."""

    upcoming: Floats  # [rows, positions modulo their number, vocabulary]; half of the positions are known
    rows: Int32s  # [batch] the row of each request, -1 if its noise is unknown
    positions: Int32s  # [batch] the position of its next token
    temperatures: Floats  # [batch]

    @classmethod
    def unknown(cls, batch: int) -> NoiseArrays:
        """Return arrays for requests whose noise is unknown, or that do not sample."""
        no_row, start = np.full(batch, -1, np.int32), np.zeros(batch, np.int32)
        return cls(np.zeros((0, 0, 0), np.float32), no_row, start, np.ones(batch, np.float32))


class BuildLimits(NamedTuple):
    """How many candidates to choose."""

    max_nodes: int  # of all requests together
    max_per_request: Int32s  # [batch]
    # The least score, times the urgency, of the next candidate, by the number of those chosen before; the last value
    # holds for all larger numbers.
    least_scores: Floats
    vocab_size: int  # drafts end before a token that is outside the vocabulary


@dataclass(slots=True)
class Candidates:
    """All candidates. The first ones, one for each request, are the roots; children of one node are neighbours."""

    nodes: Int32s  # [candidates, columns]
    scores: Floats
    features: Int32s  # [candidates, features of each]
    chosen: Int32s  # the best candidates, best first
    chosen_scores: Floats
    urgency: Floats  # of the requests of the chosen ones
    owners: Int32s  # of the chosen ones: the place of their request in the step

    def column(self, column: int) -> Int32s:
        return self.nodes[:, column]

    def learn(self, emitted: Int32s, starts: Int32s, acceptance: AcceptanceModel) -> None:
        """Teach the acceptance model which candidates came true: request b emitted `starts[b] … starts[b + 1]`."""
        learn_from_batch(acceptance.weights, acceptance.squares, (self.features, self.nodes, emitted, starts))

    def trees(self, count: int, names: tuple[str, ...], batch: int) -> DraftTrees:
        """Return the best `count` candidates as trees of the `batch` requests of the step."""
        columns, scores, starts = cut(self.nodes, self.scores, self.chosen[:count], self.owners, batch)
        return DraftTrees(columns, scores, starts.tolist(), names)


@jit
def cut(nodes, scores, chosen, owners, batch):  # type: ignore[no-untyped-def]
    """Return the chosen candidates as `DraftTrees`: columns, scores, and where each of the `batch` trees begins."""
    starts = np.zeros(batch + 1, np.int32)
    for i in range(len(chosen)):
        nodes[chosen[i], LOW] = starts[owners[i] + 1]  # its place in its own tree: its drafts are not needed any more
        starts[owners[i] + 1] += 1
    for owner in range(batch):
        starts[owner + 1] += starts[owner]
    columns, chances = np.empty((5, len(chosen)), np.int32), np.empty(len(chosen), np.float32)
    for i in range(len(chosen)):
        node, parent = chosen[i], nodes[chosen[i], PARENT]
        at = starts[owners[i]] + nodes[node, LOW]
        columns[0, at], columns[1, at] = nodes[node, TOKEN], nodes[parent, LOW] if nodes[parent, PARENT] >= 0 else -1
        columns[2, at], columns[3, at] = nodes[node, DEPTH], nodes[node, TOP_SOURCE]
        columns[4, at], chances[at] = nodes[node, NUM_SOURCES], scores[node]
    return columns, chances, starts


@jit
def learn_from_batch(weights, squares, candidates):  # type: ignore[no-untyped-def]
    """Teach an acceptance model from the tokens that every request emitted."""
    features, nodes, emitted, starts = candidates
    arrays = features, nodes[:, TOKEN], nodes[:, FIRST], nodes[:, COUNT]
    for root in range(len(starts) - 1):
        learn_along_path(weights, squares, arrays, root, emitted[starts[root] : starts[root + 1]])
