"""Draft chains from tokens alone: the likeliest path, its length, and the pool of followers."""

from __future__ import annotations

import numpy as np

from lookfar.core.arrays import Int32s
from lookfar.retrieval.draft_store import DraftStore
from lookfar.speculation.chain_proposer import FOLLOWERS, ChainProposer, count_follower

VOCAB = 100


def ids(*tokens: int) -> Int32s:
    return np.array(tokens, np.int32)


def limits(*numbers: int) -> Int32s:
    return np.array(numbers, np.int32)


def test_a_chain_copies_what_followed_and_ends_where_it_is_told() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=6, min_probability=1e-4)
    texts = [proposer.new_text(64) for _ in range(3)]
    repeated = ids(1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3)
    found = proposer.propose(texts, [repeated, repeated, ids(9, 8)], limits(1, 1, 1), limits(64, 2, 64))
    assert found[0].tolist() == [4, 5, 6, 7, 8, 1]
    assert found[1].tolist() == [4, 5, -1, -1, -1, -1]
    assert found[2].tolist() == [-1] * 6
    assert [text.size for text in texts] == [11, 11, 2]


def test_the_store_is_a_source() -> None:
    store = DraftStore(VOCAB)
    proposer = ChainProposer(store, longest=4, min_probability=1e-4)
    store.add([20, 21, 22, 23, 24, 25, 26])
    found = proposer.propose([proposer.new_text(64)], [ids(7, 20, 21, 22)], limits(1), limits(64))
    assert found[0].tolist() == [23, 24, 25, 26]


def test_requests_draft_from_what_others_emit_unless_they_may_not() -> None:
    for remember in (True, False):
        proposer = ChainProposer(DraftStore(VOCAB), longest=4, remember=remember)
        one, other = proposer.new_text(64), proposer.new_text(64)
        proposer.propose([one], [ids(30, 31, 32, 33)], limits(4), limits(64))
        found = proposer.propose([other], [ids(40, 30, 31)], limits(1), limits(64))
        assert found[0, :2].tolist() == ([32, 33] if remember else [-1, -1])


def test_chains_that_are_never_right_become_short() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=6, remember=False)
    text, rng = proposer.new_text(4000), np.random.default_rng(0)
    drafted = []
    new = ids(*rng.integers(0, 8, 40))
    for _ in range(300):
        found = proposer.propose([text], [new], limits(1), limits(64))
        drafted.append(int((found >= 0).sum()))
        wrong = (int(found[0, 0]) + 1) % 8 if found[0, 0] >= 0 else int(rng.integers(0, 8))
        new = ids(wrong)
        assert proposer.learn([[wrong]]).tolist() == [0]
    assert sum(drafted[:30]) > 10 * sum(drafted[-30:])


def test_learning_counts_right_tokens_and_takes_rows_that_are_gone() -> None:
    proposer = ChainProposer(DraftStore(VOCAB), longest=4, min_probability=1e-4)
    texts = [proposer.new_text(64) for _ in range(3)]
    repeated = ids(1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3)
    proposer.propose(texts, [repeated] * 3, limits(1, 1, 1), limits(64, 64, 64))
    assert proposer.learn([[4, 5, 9], [], [4, 5, 6, 7, 8]]).tolist() == [2, 0, 4]
    assert proposer.learn([[4]]).tolist() == [0]  # nothing was proposed since


def test_followers_are_sorted_by_count_then_recency() -> None:
    row, logits = np.full(24, -1, np.int32), np.zeros(24, np.float32)
    for token in (5, 6, 6, 7, 5, 5):
        count_follower(row, logits, token)
    assert row[:4].tolist() == [5, 6, 7, -1]
    assert np.allclose(np.exp(logits[:3]), [3, 2, 1])
    for token in range(10, 40):
        count_follower(row, logits, token)
    assert row[:2].tolist() == [5, 6]
    assert row[FOLLOWERS - 1] >= 0
    assert row[FOLLOWERS] == -1
    assert 39 in row.tolist()
