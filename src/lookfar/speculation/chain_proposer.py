"""Draft chains from tokens alone, for engines that show neither logits nor requests.

The sources are those of the suffix drafter, the request's own text and the draft store, and a pool that counts which
tokens followed which in the output of any request. Chains end where they are no longer likely; how likely they really
were is learned from what followed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.core.arrays import Int32s, Ints
from lookfar.drafters.suffix import CHAINED_LENGTHS
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.follower_pool import FollowerPool
from lookfar.retrieval.suffix_index import SuffixIndex
from lookfar.speculation.calibration import Calibration
from lookfar.speculation.chain_builder import DraftChains, TokenRows, build, learn

MIN_PROBABILITY = 0.1
PAIRS = 1 << 16  # of tokens, that the pool holds


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
        self.remember = remember
        self.calibration = Calibration()
        self.pool = FollowerPool(store.vocab_size, PAIRS) if remember else FollowerPool(0, 0)
        self._lengths = np.array(CHAINED_LENGTHS, np.int32)
        self._last: DraftChains | None = None

    def new_text(self, max_length: int) -> SuffixIndex:
        """Return an empty text for `propose`."""
        return SuffixIndex(max_length + 1, CHAINED_LENGTHS)

    def propose(self, texts: Seq[SuffixIndex], rows: TokenRows, emitted: Ints, limits: Ints) -> DraftChains:
        """Append the new tokens of its row to each text and propose what follows, at most `limits` tokens.

        The model emitted the last `emitted` tokens of each row.
        """
        for text, size in zip(texts, rows.sizes.tolist(), strict=True):
            if size > text.room:
                text.make_room(size)
        if self.remember:
            self.pool.learn(rows, emitted)
        followed = np.array([text.address for text in texts]), self._lengths
        with self.store.locked_index() as index:
            stored = (index.address if index.size else 0), index.lengths
            least, counts = np.float32(self.min_probability), self.calibration.counts
            limited = limits, self.longest, least, counts, self.store.vocab_size
            chains = DraftChains(*build(followed, tuple(rows), stored, tuple(self.pool.arrays), limited))
        self._last = chains
        return chains

    def learn(self, emitted: Seq[Seq[int]]) -> Ints:
        """Learn from the tokens that followed the texts of the last proposal, in its order; empty if they are unknown.

        Returns how many tokens of each chain were right.
        """
        chains, self._last = self._last, None
        if chains is None or len(emitted) != len(chains.tokens):
            return np.zeros(len(emitted), np.int64)
        starts: Ints = np.zeros(len(emitted) + 1, np.int64)
        np.cumsum([len(tokens) for tokens in emitted], out=starts[1:])
        flat: Int32s = np.array([token for tokens in emitted for token in tokens], np.int32)
        right: Ints = learn(self.calibration.counts, tuple(chains), flat, starts)
        return right
