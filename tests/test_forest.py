"""Candidate trees: everything offered is there once, the best is taken first, and what is taken makes trees."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from lookfar.calibration import Calibration
from lookfar.forest import Forest, Luck, Offers, grow_forest
from lookfar.successors import NO_SUCCESSORS, Successors

SOURCES = ("suffix", "trie")
drafts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 12), st.integers(0, 1)), max_size=8
)
batches = st.lists(drafts, min_size=1, max_size=3)


def offers_of(batch: list[list[tuple[list[int], int, int]]], limit: int = 9) -> Offers:
    every = [draft for of_one in batch for draft in of_one]
    table = np.full((len(every), 6), -1, np.int32)
    for row, (path, _, _) in zip(table, every, strict=True):
        row[: len(path)] = path
    return Offers(
        drafts=table,
        grades=np.array([grade for _, grade, _ in every], np.int32),
        weights=np.ones(len(every), np.float32),
        sources=np.array([source for _, _, source in every], np.int32),
        starts=np.cumsum([0, *map(len, batch)], dtype=np.int32),
        roots=np.array([[2, 3]] * len(batch), np.int32),
        runners=np.full((len(batch), 7), -1, np.int32),
        runner_logits=np.zeros((len(batch), 7), np.float32),
        luck=Luck.unknown(len(batch)),
        limits=np.full(len(batch), limit, np.int32),
    )


def room(each: int) -> np.ndarray:
    """As many candidates for each sequence of a batch."""
    return np.full(3, each, np.int32)


def paths(forest: Forest, owner: int) -> list[tuple[int, ...]]:
    """The paths of the candidates that were taken, in their order."""
    spelled: dict[int, tuple[int, ...]] = {owner: ()}
    taken = []
    for node in forest.picked.tolist():
        if forest.owners[node] == owner:
            spelled[node] = (*spelled[int(forest.parents[node])], int(forest.tokens[node]))  # its parent came before
            taken.append(spelled[node])
    return taken


@given(batches)
@settings(max_examples=150)
def test_all_prefixes_of_all_drafts_and_nothing_else(batch: list[list[tuple[list[int], int, int]]]) -> None:
    forest = grow_forest(offers_of(batch), NO_SUCCESSORS, Calibration(SOURCES), 500, room(500), 0.0)
    for owner, of_one in enumerate(batch):
        expected = {tuple(path[:end]) for path, _, _ in of_one for end in range(1, len(path) + 1)}
        taken = paths(forest, owner)
        assert len(taken) == len(set(taken))
        assert set(taken) == expected
    for node in forest.picked.tolist():
        backers = {s for path, _, s in batch[forest.owners[node]] if _passes(forest, node, path)}
        assert forest.backers[node] == len(backers)
        assert SOURCES[forest.sources[node]] in {SOURCES[s] for s in backers}


def _passes(forest: Forest, node: int, path: list[int]) -> bool:
    own: list[int] = []
    while forest.parents[node] >= 0:
        own.insert(0, int(forest.tokens[node]))
        node = int(forest.parents[node])
    return path[: len(own)] == own


@given(batches, st.integers(0, 12), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=150)
def test_the_best_are_taken_and_limits_hold(
    batch: list[list[tuple[list[int], int, int]]], most: int, each: int, limit: int
) -> None:
    calibration = Calibration(SOURCES)
    everything = grow_forest(offers_of(batch, limit), NO_SUCCESSORS, calibration, 500, room(500), 0.0)
    forest = grow_forest(offers_of(batch, limit), NO_SUCCESSORS, calibration, most, room(each), 0.0)
    scores = forest.scores[forest.picked]
    assert (np.diff(scores) <= 1e-6).all()
    assert len(forest.picked) <= most
    assert np.bincount(forest.owners[forest.picked], minlength=1).max() <= each
    assert forest.depths.max() <= limit
    if each >= most:
        best = np.sort(everything.scores[everything.picked])[::-1][:most]
        assert np.allclose(scores, best, atol=1e-6)
    floor = 0.2
    above = grow_forest(offers_of(batch, limit), NO_SUCCESSORS, calibration, 500, room(500), floor)
    assert (above.scores[above.picked] >= floor).all()
    assert len(above.picked) == (everything.scores[everything.picked] >= floor).sum()


def test_two_sources_for_a_token_are_worth_more_than_one() -> None:
    calibration = Calibration(SOURCES)
    alone = grow_forest(offers_of([[([1], 5, 0)]]), NO_SUCCESSORS, calibration, 9, room(9), 0.0)
    agreed = grow_forest(offers_of([[([1], 5, 0), ([1], 5, 1)]]), NO_SUCCESSORS, calibration, 9, room(9), 0.0)
    against = grow_forest(offers_of([[([1], 5, 0), ([2], 5, 1)]]), NO_SUCCESSORS, calibration, 9, room(9), 0.0)
    assert agreed.scores[1] > alone.scores[1] > against.scores[1]
    assert (alone.backers[1], agreed.backers[1]) == (1, 2)


def test_successors_continue_every_path() -> None:
    successors = Successors(20, 64)
    top = np.array([[10, 11, 12, -1, -1, -1, -1, -1]], np.int32)
    logits = np.array([[9.0, 5, 1, 0, 0, 0, 0, 0]], np.float32)
    one = np.array
    successors.learn(one([-1], np.int32), one([7], np.int32), top, logits)  # after 7, whatever was before
    successors.learn(one([7], np.int32), one([10], np.int32), top + 3 * (top >= 0), logits)  # after the pair 7, 10
    forest = grow_forest(offers_of([[([7], 5, 0)]]), successors, Calibration(SOURCES), 30, room(30), 0.0)
    taken = paths(forest, 0)
    assert (7, 10, 13) in taken
    assert (7, 11) in taken
    assert (7, 12) in taken
    assert taken.index((7, 10)) < taken.index((7, 11)) < taken.index((7, 12))
    node = next(n for n in forest.picked if forest.tokens[n] == 10 and forest.depths[n] == 2)
    assert forest.sources[node] == len(SOURCES)  # nobody drafted it
    assert forest.backers[node] == 1


def test_runners_up_are_candidates_for_the_first_place_only() -> None:
    offers = offers_of([[([1, 1], 5, 0)]])
    offers.runners[0, :2] = 8, 9
    forest = grow_forest(offers, NO_SUCCESSORS, Calibration(SOURCES), 30, room(30), 0.0)
    assert {(8,), (9,)} <= set(paths(forest, 0))
    assert not {path for path in paths(forest, 0) if len(path) > 1 and path[-1] in (8, 9)}


def test_remembered_predictions_are_ranked_with_the_noise_they_meet() -> None:
    """argmax(p / noise): a little noise makes a token win, whatever its rank was."""
    successors = Successors(40, 16)
    ids, logits = np.array([[7, 8, 9]], np.int32), np.array([[2.0, 1.5, 1.0]], np.float32)
    successors.learn(np.array([2], np.int32), np.array([3], np.int32), ids, logits)  # after the root of `offers_of`
    offers = offers_of([[]], limit=1)
    blind = paths(grow_forest(offers, successors, Calibration(SOURCES), 9, room(9), 0.0), 0)
    assert blind == [(7,), (8,), (9,)]
    for lucky in (7, 8, 9):
        coming = np.ones((2, 4, 40), np.float32)
        coming[1, 5 % 4, lucky] = 0.01  # row 1, place 5
        coming[1, 2, 7 + (lucky - 6) % 3] = 1e-6  # other places do not matter
        offers.luck = Luck(coming, np.array([1], np.int32), np.array([5], np.int32), np.ones(1, np.float32))
        ranked = paths(grow_forest(offers, successors, Calibration(SOURCES), 9, room(9), 0.0), 0)
        assert ranked[0] == (lucky,)
    offers.luck = Luck.unknown(1)
    offers.luck.heats[0] = 0.05  # nearly greedy: the best is nearly sure
    cold = grow_forest(offers, successors, Calibration(SOURCES), 9, room(9), 0.0)
    warm = grow_forest(offers_of([[]], limit=1), successors, Calibration(SOURCES), 9, room(9), 0.0)
    assert cold.scores[cold.picked[0]] > warm.scores[warm.picked[0]]
