"""Draft chains: the most likely path of every request, with the evidence and estimates of draft trees.

For engines that verify one line of draft tokens. Only the nodes of the path are expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.jit import jit
from lookfar.retrieval.recycle_table import RecycleArrays
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.tree_builder import (
    DEPTH,
    MAX_DEPTH,
    TOKEN,
    BuildInputs,
    BuildLimits,
    DraftArrays,
    NoiseArrays,
    RootArrays,
    expand,
    learn_from_batch,
    new_workspace,
    set_roots,
    sort_by_owner,
)


@dataclass(slots=True)
class DraftChains:
    """The chains of a batch and all candidates that were considered for them."""

    tokens: Int32s  # [batch, longest] -1 behind the end of a chain
    scores: Floats  # [batch, longest] the estimated probability that the chain is accepted up to here, 0 behind its end
    nodes: Int32s  # [candidates, columns of tree_builder]
    features: Int32s  # [candidates, features of each]

    def learn(self, emitted: Int32s, starts: Int32s, acceptance: AcceptanceModel) -> None:
        """Teach the acceptance model what followed: request b emitted `starts[b] … starts[b + 1]`."""
        learn_from_batch(acceptance.weights, acceptance.squares, (self.features, self.nodes, emitted, starts))


def build_chains(inputs: BuildInputs, longest: int, min_score: float, vocab_size: int) -> DraftChains:
    """Build the chains of all requests, of at most `longest` tokens; they end where the score falls below a minimum."""
    arrays = tuple(inputs.drafts), tuple(inputs.roots), tuple(inputs.noise), tuple(inputs.table.arrays)
    batch = len(inputs.roots.about)
    limits = BuildLimits(batch * longest, np.full(batch, longest, np.int32), min_score, vocab_size)
    return DraftChains(*build(arrays, inputs.acceptance.weights, tuple(limits), longest))


@jit
def build(arrays, weights, limits, longest):  # type: ignore[no-untyped-def]
    """Follow the most likely child from every root. Returns the arrays of `DraftChains`."""
    drafts, roots, noise = DraftArrays(*arrays[0]), RootArrays(*arrays[1]), NoiseArrays(*arrays[2])
    table, limits = RecycleArrays(*arrays[3]), BuildLimits(*limits)
    batch = len(roots.about)
    work = new_workspace(drafts, noise, table, weights, limits)
    nodes, scores = work.nodes, work.scores
    tokens, chances = np.full((batch, longest), -1, np.int32), np.zeros((batch, longest), np.float32)
    set_roots(work, roots)
    sort_by_owner(work, drafts.owners, batch)
    used, b, node = batch, 0, 0
    while b < batch:
        best = -1
        if nodes[node, DEPTH] < min(longest, roots.about[b, MAX_DEPTH]):
            count = expand(work, node, used, (drafts, roots, noise, table), weights, limits)
            for child in range(used, used + count):
                if scores[child] >= limits.min_score and (best < 0 or scores[child] > scores[best]):
                    best = child
            used += count
        if best < 0:
            b += 1
            node = b
        else:
            tokens[b, nodes[node, DEPTH]], chances[b, nodes[node, DEPTH]] = nodes[best, TOKEN], scores[best]
            node = best
    return tokens, chances, nodes[:used], work.features[:used]
