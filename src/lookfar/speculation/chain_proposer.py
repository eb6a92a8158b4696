"""Draft chains from tokens alone, for engines that show neither logits nor requests.

The sources are those of the suffix drafter, the request's own text and the draft store, and a pool: counts of the
tokens that followed each token and pair in the output of any request, in the arrays of a recycle table. The acceptance
model estimates how likely each token is, learns from what followed, and decides how long a chain is worth being.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.drafters.suffix import CHAINED_LENGTHS, SuffixDrafter, as_proposal
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.recycle_table import NO_RECYCLING, RecycleTable, pair_slot
from lookfar.retrieval.sources import PAIRS
from lookfar.retrieval.suffix_index import FollowedTexts, SuffixIndex, tail_of
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.chain_builder import DraftChains, build_chains
from lookfar.speculation.proposals import no_runner_ups
from lookfar.speculation.tree_builder import (
    BEFORE,
    LAST,
    MAX_DEPTH,
    PLACE,
    BuildInputs,
    DraftArrays,
    NoiseArrays,
    RootArrays,
)

MIN_PROBABILITY = 0.05
FOLLOWERS = 8  # that the pool keeps for each token and pair
BRANCHES = 16  # places in each text that are copied from


class ChainProposer:
    """Proposes one chain of at most `longest` tokens for each text of a batch.

    A chain ends before the token that makes it less likely than `min_probability` to be accepted as a whole. With
    `remember`, requests draft from what others have emitted.
    """

    def __init__(
        self, store: DraftStore, longest: int, min_probability: float = MIN_PROBABILITY, remember: bool = True
    ) -> None:
        self.store = store
        self.longest = longest
        self.min_probability = min_probability
        self.acceptance = AcceptanceModel(SuffixDrafter.source_names)
        self.pool = RecycleTable(store.vocab_size, PAIRS) if remember else NO_RECYCLING
        self._last: DraftChains | None = None

    def new_text(self, max_length: int) -> SuffixIndex:
        """Return an empty text for `propose`."""
        return SuffixIndex(max_length + 1, CHAINED_LENGTHS)

    def propose(self, texts: Seq[SuffixIndex], new: Seq[Int32s], emitted: Int32s, limits: Int32s) -> Int32s:
        """Append new tokens to each text and propose what follows, at most `limits` tokens.

        The model emitted the last `emitted` of the new tokens. Returns [texts, longest], -1 behind the end of each
        chain.
        """
        depths = np.minimum(limits, self.longest).astype(np.int32)
        wanted = np.stack([np.full(len(texts), BRANCHES, np.int32), np.maximum(depths, 1)], 1)
        followed = FollowedTexts(texts)
        found = as_proposal(self.store.find_new(followed, new, wanted))
        if self.pool is not NO_RECYCLING:
            learn_followers(tuple(self.pool.arrays), followed.addresses, emitted)
        drafts = DraftArrays(found.drafts, found.scores, found.weights, found.sources, found.owners)
        about: Int32s = np.empty((len(texts), 4), np.int32)
        for i, text in enumerate(texts):
            about[i, LAST] = text.text[-1]
            about[i, BEFORE] = text.text[-2] if text.size > 1 else -1
        about[:, MAX_DEPTH], about[:, PLACE] = depths, np.arange(len(texts))
        roots = RootArrays(about, *no_runner_ups(len(texts)), np.ones(len(texts), np.float32))
        inputs = BuildInputs(drafts, roots, NoiseArrays.unknown(len(texts)), self.pool, self.acceptance)
        chains = build_chains(inputs, self.longest, self.min_probability / 2, self.store.vocab_size)
        likely = self.acceptance.calibration.apply(chains.scores.reshape(-1)).reshape(chains.scores.shape)
        chains.tokens[np.logical_or.accumulate(likely < self.min_probability, axis=1)] = -1
        self._last = chains
        return chains.tokens

    def learn(self, emitted: Seq[Seq[int]]) -> Ints:
        """Learn from the tokens that followed the texts of the last proposal, in its order; empty if they are unknown.

        Returns how many tokens of each chain were right.
        """
        chains, self._last = self._last, None
        if chains is None or len(emitted) != len(chains.tokens):
            return np.zeros(len(emitted), np.int64)
        starts: Int32s = np.zeros(len(emitted) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in emitted], out=starts[1:])
        flat = np.array([token for tokens in emitted for token in tokens], np.int32)
        chains.learn(flat, starts, self.acceptance)
        return self._calibrate(chains, flat, starts)

    def _calibrate(self, chains: DraftChains, emitted: Int32s, starts: Int32s) -> Ints:
        """Compare chains with what followed."""
        counts = np.diff(starts)
        followed: Int32s = np.full(chains.tokens.shape, -2, np.int32)
        at = np.arange(self.longest)
        rows, places = np.nonzero(at < counts[:, None])
        followed[rows, places] = emitted[starts[rows] + places]
        right: Ints = np.logical_and.accumulate(followed == chains.tokens, axis=1).sum(1)
        known = (chains.tokens >= 0) & (counts[:, None] > 0)
        number = np.cumsum(known.reshape(-1)).reshape(known.shape) - 1
        scores: Floats = chains.scores[known]
        accepted = number[known & (at < right[:, None])].astype(np.int32)
        self.acceptance.calibration.learn(scores, accepted)
        return right


@jit
def learn_followers(arrays, addresses, counts):  # type: ignore[no-untyped-def]
    """Count the last tokens of several texts as followers of the token and of the pair before them."""
    token_ids, token_logits, pair_keys, pair_ids, pair_logits = arrays[:5]
    for i in range(len(addresses)):
        tail = tail_of(addresses[i])
        for place in range(max(len(tail) - counts[i], 1), len(tail)):
            token, follower = tail[place - 1], tail[place]
            if follower < 0 or not 0 <= token < len(token_ids):
                continue
            count_follower(token_ids[token], token_logits[token], follower)
            if place > 1 and tail[place - 2] >= 0:
                key = (np.int64(tail[place - 2]) << 32) | token
                slot = pair_slot(tail[place - 2], token, len(pair_keys))
                if pair_keys[slot] != key:
                    pair_keys[slot] = key
                    pair_ids[slot] = -1
                count_follower(pair_ids[slot], pair_logits[slot], follower)


@jit
def count_follower(ids, logits, follower):  # type: ignore[no-untyped-def]
    """Count a follower in a row of a table: most frequent first, then latest; a logit is the logarithm of a count.

    In a full row a new follower takes the place of the last one.
    """
    place, last = 0, min(len(ids), FOLLOWERS) - 1
    while place < last and ids[place] >= 0 and ids[place] != follower:
        place += 1
    count = np.exp(logits[place]) + np.float32(1.0) if ids[place] == follower else np.float32(1.0)
    logit = np.log(count)
    while place > 0 and logits[place - 1] <= logit:
        ids[place], logits[place] = ids[place - 1], logits[place - 1]
        place -= 1
    ids[place], logits[place] = follower, logit
