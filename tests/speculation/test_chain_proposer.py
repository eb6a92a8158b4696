"""Draft chains from tokens alone: the likeliest tokens, how many of them, and what is learned from the next ones."""

from __future__ import annotations

import numpy as np

from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.suffix_index import SuffixIndex
from lookfar.speculation.chain_builder import TokenRows
from lookfar.speculation.chain_proposer import ChainProposer

VOCAB = 100


def rows_of(*texts: list[int]) -> TokenRows:
    """Put texts into the odd rows of an array."""
    tokens = np.full((2 * len(texts) + 1, 4096), 77, np.int32)
    for i, text in enumerate(texts):
        tokens[2 * i + 1, : len(text)] = text
    return TokenRows(tokens, 1 + 2 * np.arange(len(texts)), np.array([len(text) for text in texts]))


def proposed(
    proposer: ChainProposer, indexes: list[SuffixIndex], texts: list[list[int]], emitted: int = 1, limit: int = 64
) -> list[list[int]]:
    """Return the tokens to draft after each text."""
    numbers = np.full(len(texts), emitted), np.full(len(texts), limit)
    chains = proposer.propose(indexes, rows_of(*texts), *numbers)
    return [chain[:length] for chain, length in zip(chains.tokens.tolist(), chains.lengths.tolist(), strict=True)]


def one(proposer: ChainProposer, text: list[int], emitted: int = 1, limit: int = 64) -> list[int]:
    return proposed(proposer, [proposer.new_text(4000)], [text], emitted, limit)[0]


def test_a_chain_copies_what_followed_and_ends_where_it_is_told() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=6, min_probability=1e-4)
    repeated = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    indexes = [proposer.new_text(64) for _ in range(3)]
    limits = np.array([64, 2, 64])
    chains = proposer.propose(indexes, rows_of(repeated, repeated, [9, 8]), np.ones(3, np.int64), limits)
    assert chains.tokens.tolist() == [[4, 5, 6, 7, 8, 1], [4, 5, -1, -1, -1, -1], [-1] * 6]
    assert chains.lengths.tolist() == [6, 2, 0]
    assert [index.text.tolist() for index in indexes] == [repeated, repeated, [9, 8]]


def test_long_texts_and_limits_of_zero() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=4)
    index = proposer.new_text(4095)
    assert len(index._tokens) < 4095 or index.room >= 4095
    assert proposed(proposer, [index], [[1, 2, 3] * 1300])[0] == [1, 2, 3, 1]
    assert index.size == 3900
    assert one(proposer, [1, 2, 3, 1, 2, 3], limit=0) == []


def test_the_store_is_a_source() -> None:
    store = DraftStore(VOCAB)
    proposer = ChainProposer(store, longest=4, min_probability=1e-4)
    store.add([20, 21, 22, 23, 24, 25, 26])
    assert one(proposer, [7, 20, 21, 22]) == [23, 24, 25, 26]


def test_the_longest_match_outweighs_many_short_ones_and_frequency_decides_among_equals() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=1, min_probability=1e-4, remember=False)
    short = [5, 9, 40, 5, 8, 40, 5, 7, 40]  # 40 is followed by 5
    assert one(proposer, [1, 2, 3, 40, 6, *short[:-1], 1, 2, 3, 40]) == [6]
    assert one(proposer, [30, 40, 6, 31, 40, 5, 32, 40, 5, 33, 40, 6, 34, 40, 5, 50, 40]) == [5]


def test_a_chain_goes_on_with_the_matches_that_agree_with_it() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=2, min_probability=1e-4, remember=False)
    text = [10, 20, 1, 10, 21, 2, 10, 21, 3, 10, 20, 1, 10, 21, 3, 50, 10]
    assert one(proposer, text) == [21, 3]


def test_requests_draft_from_what_others_emit_unless_they_may_not() -> None:
    for remember in (True, False):
        proposer = ChainProposer(DraftStore(VOCAB), longest=4, remember=remember)
        one(proposer, [30, 31, 32, 33], emitted=4)
        assert one(proposer, [40, 30, 31])[:2] == ([32, 33] if remember else [])


def test_chains_that_are_never_right_become_short() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=6, remember=False)
    index, rng = proposer.new_text(4000), np.random.default_rng(0)
    drafted = []
    text = rng.integers(0, 8, 40).tolist()
    for _ in range(300):
        found = proposed(proposer, [index], [text])[0]
        drafted.append(len(found))
        wrong = (found[0] + 1) % 8 if found else int(rng.integers(0, 8))
        text.append(wrong)
        assert proposer.learn([[wrong]]).max() <= (0 if found else 1)
    assert sum(drafted[:30]) > 10 * sum(drafted[-30:])


def test_drafting_begins_again_when_chains_become_right() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=4, min_probability=0.3, remember=False)
    proposer.calibration.counts[1] = 0.01  # as if nothing had ever been accepted
    index, text = proposer.new_text(4000), [1, 2, 3, 4, 5, 6] * 3
    found = proposed(proposer, [index], [text])[0]
    assert found == []
    for _ in range(200):
        new = [(text[-1] + i) % 6 + 1 for i in range(len(found) + 1)]  # all of the draft and one more
        text += new
        proposer.learn([new])
        found = proposed(proposer, [index], [text])[0]
    assert len(found) == 4


def test_learning_counts_right_tokens_and_takes_rows_that_are_gone() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=4, min_probability=1e-4)
    repeated = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    proposed(proposer, [proposer.new_text(64) for _ in range(3)], [repeated] * 3)
    assert proposer.learn([[4, 5, 9], [], [4, 5, 6, 7, 8]]).tolist() == [2, 0, 4]
    assert proposer.learn([[4]]).tolist() == [0]  # nothing was proposed since


def test_tokens_outside_the_vocabulary_end_a_chain() -> None:
    proposer = ChainProposer(DraftStore(10), longest=4, min_probability=1e-4)
    assert one(proposer, [1, 2, 3, 50, 1, 2]) == [3]
    assert one(proposer, [1, 2, -1, 50, 1, 2]) == []


def test_rows_continue_texts_token_for_token() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=4)
    index = proposer.new_text(64)
    index.extend([1, 2, 3])
    empty = proposer.new_text(64)
    rows = rows_of([1, 2, 3], [1, 2, 3, 4], [1, 2], [0, 2, 3, 4], [1, 2, 4], [1, 2, 3], [5])
    addresses = np.array([index.address] * 5 + [0, empty.address])
    assert rows.continue_texts(addresses) == [True, True, False, False, False, False, True]
