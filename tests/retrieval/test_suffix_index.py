"""The suffix index finds what a search through the whole text finds."""

from __future__ import annotations

import copy
import pickle

import numpy as np
from hypothesis import assume, given, settings, strategies as st

from lookfar.retrieval.suffix_index import END, LENGTH, MAX_LINKS, MAX_MATCH, FollowedTexts, SuffixIndex

texts = st.lists(st.integers(0, 3), min_size=2, max_size=60)


def brute_force(text: list[int], tail: list[int]) -> dict[int, int]:
    """Place → length of the match that ends there, for places with something behind them."""
    found = {}
    for place in range(len(text) - 1):
        length = 0
        while length < min(len(tail), place + 1, MAX_MATCH) and text[place - length] == tail[-1 - length]:
            length += 1
        if length:
            found[place] = length
    return found


def longest_chain(index: SuffixIndex) -> int:
    longest = 0
    for heads, links in zip(index._heads, index._links, strict=True):
        for place in heads.tolist():
            length = 0
            while place >= 0:
                place, length = int(links[place]), length + 1
            longest = max(longest, length)
    return longest


@given(texts)
@settings(max_examples=200)
def test_matches_in_the_own_text(text: list[int]) -> None:
    index = SuffixIndex(100, (8, 4, 2, 1))
    for start in range(0, len(text), 7):  # it grows as a text does
        index.extend(text[start : start + 7])
    assume(longest_chain(index) <= MAX_LINKS)  # longer ones are not searched to their end
    drafts, matched = index.find(np.array(text[-MAX_MATCH:], np.int32), limit=16, depth=5)
    expected = brute_force(text, text)
    assert len(matched) == min(len(expected), 16)
    assert sorted(expected.values(), reverse=True)[: len(matched)] == matched.tolist()  # the longest ones, in order
    for draft, length in zip(drafts.tolist(), matched.tolist(), strict=True):
        # A match that runs into the end of the text repeats itself.
        assert draft in [(text[place + 1 :] * 5)[:5] for place, known in expected.items() if known == length]


def test_a_text_is_followed_as_it_is_extended_and_searched() -> None:
    text = np.random.default_rng(0).integers(0, 50, 9000).tolist()
    followed, other = SuffixIndex(10000, (8, 4, 2, 1)), SuffixIndex(10000, (8, 4, 2, 1))
    for start, end in (
        (0, 3),
        (3, 4),
        (4, 4000),
        (4000, 4001),
        (4001, 4200),
        (4200, 9000),
        (9000, 9000),
    ):  # grows twice
        other.extend(text[start:end])
        expected = other.find(np.array(text[max(end - MAX_MATCH, 0) : end], np.int32), limit=8, depth=6)
        found = FollowedTexts([followed]).find([text[:end]], np.array([[8, 6]], np.int32))
        assert followed.text.tolist() == text[:end]
        assert np.array_equal(found.continuations, expected[0])
        assert np.array_equal(found.about[LENGTH], expected[1])


def test_equal_matches_come_latest_first() -> None:
    index = SuffixIndex(100, (2, 1))
    index.extend([1, 2, 30, 1, 2, 31, 1, 2])
    drafts, matched = index.find(np.array([1, 2], np.int32), limit=2, depth=1)
    assert drafts.tolist() == [[31], [30]]
    assert matched.tolist() == [2, 2]


def test_a_copy_has_arrays_of_its_own() -> None:
    index = SuffixIndex(100, (2, 1))
    index.extend([1, 2, 3])
    for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        other.extend([1, 2, 4])
        assert index.text.tolist() == [1, 2, 3]
        assert other.find(np.array([1, 2], np.int32), 9, 1)[0].tolist() == [[4], [3]]
        del other
    assert index.find(np.array([1, 2], np.int32), 9, 1)[0].tolist() == [[3]]


def test_texts_are_kept_apart() -> None:
    index = SuffixIndex(100, (2, 1))
    index.extend([1, 2, 3, END, 4, 5, END])
    drafts, matched = index.find(np.array([9, 2], np.int32), limit=9, depth=4)
    assert drafts.tolist() == [[3, -1, -1, -1]]
    assert matched.tolist() == [1]
    for tail in ([3], [5], [3, 4]):  # the end of a text, and a match across two
        found = index.find(np.array(tail, np.int32), limit=9, depth=4)[1]
        assert found.tolist() == ([1] if tail == [3, 4] else [])


def test_the_older_half_is_forgotten() -> None:
    index = SuffixIndex(1000, (2,))
    for start in range(0, 5000, 10):
        index.extend(range(start, start + 10))
        assert index.size <= 1000
    assert index.text[-1] == 4999
    assert len(index.find(np.array([4990, 4991], np.int32), 4, 3)[0]) == 1
    assert len(index.find(np.array([10, 11], np.int32), 4, 3)[0]) == 0
    assert index.nbytes < 1000 * 16


def test_a_text_longer_than_the_room_leaves_its_end() -> None:
    index = SuffixIndex(100, (2,))
    index.extend(range(1000))
    assert index.text.tolist() == list(range(950, 1000))


def test_what_fits_is_kept_whole() -> None:
    index = SuffixIndex(100, (2,))
    index.extend(range(90))  # more than half of the room, as a long prompt is
    index.extend(range(90, 100))
    assert index.text.tolist() == list(range(100))
