"""The trie counts what a dictionary of all branches counts, within its bound."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings, strategies as st

from lookfar.retrieval.trie import COUNT, FIRST, NEXT, PARENT, PREVIOUS, TOKEN, CountedTrie

texts = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=4)


def branches(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, min(start + depth, len(text)) + 1)
    )


def spelled(trie: CountedTrie) -> dict[tuple[int, ...], int]:
    """Every path and its count, read from the node table."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, trie.size):
        paths[node] = (*paths[int(trie.arrays.nodes[node, PARENT])], int(trie.arrays.nodes[node, TOKEN]))
    return {paths[node]: int(trie.arrays.nodes[node, COUNT]) for node in range(1, trie.size)}


def check_lists(trie: CountedTrie) -> None:
    """Each node is in its parent's list once, and the list reads the same backwards."""
    children: dict[int, list[int]] = {}
    for node in range(1, trie.size):
        children.setdefault(int(trie.arrays.nodes[node, PARENT]), []).append(node)
    for parent in range(trie.size):
        listed, node, before = [], int(trie.arrays.nodes[parent, FIRST]), -1
        while node >= 0:
            assert trie.arrays.nodes[node, PREVIOUS] == before
            listed.append(node)
            before, node = node, int(trie.arrays.nodes[node, NEXT])
        assert sorted(listed) == children.get(parent, [])


@given(texts)
@settings(max_examples=100)
def test_counts_are_those_of_all_branches(texts: list[list[int]]) -> None:
    trie = CountedTrie(depth=5, max_nodes=10_000)
    for text in texts:
        trie.insert(text)
    expected = branches(texts, 5)
    assert spelled(trie) == dict(expected)
    check_lists(trie)
    for path in expected:
        assert trie.arrays.nodes[trie.find(np.array(path, np.int32)), COUNT] == expected[path]
    assert trie.find(np.array([7], np.int32)) == -1


@given(texts, st.integers(1, 10))
@settings(max_examples=50)
def test_a_text_may_come_in_pieces(texts: list[list[int]], cut: int) -> None:
    whole, pieces = CountedTrie(4, 10_000), CountedTrie(4, 10_000)
    for text in texts:
        whole.insert(text)
        pieces.insert(text, until=min(cut, len(text)))
        pieces.insert(text[cut:])
    assert spelled(whole) == spelled(pieces)


@given(texts)
@settings(max_examples=50)
def test_merging_adds_counts(texts: list[list[int]]) -> None:
    one, other = CountedTrie(5, 10_000), CountedTrie(5, 10_000)
    one.insert(texts[0])
    for text in texts:
        other.insert(text)
    one.merge(other.counted())
    assert spelled(one) == dict(branches([texts[0], *texts], 5))
    check_lists(one)


def test_the_bound_holds_and_the_frequent_survive() -> None:
    rng = np.random.default_rng(0)
    trie = CountedTrie(depth=4, max_nodes=2000)
    often = [1, 2, 3, 4]
    for _ in range(300):
        trie.insert(often)
        trie.insert(rng.integers(10, 5000, 40).tolist())
        assert trie.size <= 2000
        assert len(trie.arrays.nodes) <= 2000
    check_lists(trie)
    counts = spelled(trie)
    assert counts[1, 2, 3, 4] > 10
    assert counts[1, 2, 3, 4] <= counts[1, 2, 3] <= counts[1, 2] <= counts[1,]
    again = CountedTrie(depth=4, max_nodes=200)  # merging more than fits prunes as well
    again.merge(trie.counted())
    assert again.size <= 200
    assert spelled(again)[1, 2] > 0
    check_lists(again)


@given(texts, texts, st.integers(0, 4), st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=100)
def test_the_best_branches_are_those_with_the_highest_counts(
    outputs: list[list[int]], prompts: list[list[int]], key: int, most: int, deepest: int
) -> None:
    shared, own = CountedTrie(5, 10_000), CountedTrie(5, 10_000)
    for text in outputs:
        shared.insert(text)
    for text in prompts:
        own.insert(text)
    suffix = np.array([key], np.int32)
    tokens, parents, depths, weights = shared.best_branches(suffix, 1.0, own, 2.0, (most, deepest))
    mixed: Counter[tuple[int, ...]] = Counter()
    for texts, weight in ((outputs, 1), (prompts, 2)):
        for path, count in branches(texts, 5).items():
            if path[0] == key and 1 < len(path) <= deepest + 1:
                mixed[path[1:]] += weight * count
    assert sorted(weights.tolist(), reverse=True) == sorted(mixed.values(), reverse=True)[:most]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert [mixed[path] for path in paths] == weights.tolist()
    assert depths.tolist() == [len(path) for path in paths]


def test_a_frequent_child_is_found_among_many_rare_ones() -> None:
    trie = CountedTrie(depth=2, max_nodes=100_000)
    for token in range(100, 1100):  # a thousand children, far more than a look-up reads
        trie.insert([1, token])
        if token % 3 == 0:
            trie.insert([1, 7])
        if token % 5 == 0:
            trie.insert([1, 8])
    nothing = CountedTrie(1, 2)
    tokens, _, _, weights = trie.best_branches(np.array([1], np.int32), 1.0, nothing, 0.0, (2, 1))
    assert tokens.tolist() == [7, 8]
    assert weights.tolist() == [333, 200]
