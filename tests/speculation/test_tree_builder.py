"""Draft trees: everything proposed is there once, the best is chosen first, and what is chosen forms trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lookfar.core.host_team import HostTeam
from lookfar.retrieval.recycle_table import NO_RECYCLING, RecycleTable
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.candidates import (
    COUNT,
    DEPTH,
    FIRST,
    NUM_SOURCES,
    OWNER,
    PARENT,
    TOKEN,
    TOP_SOURCE,
    BuildLimits,
    Candidates,
    DraftArrays,
    NoiseArrays,
    RootArrays,
)
from lookfar.speculation.proposals import no_off_path
from lookfar.speculation.tree_builder import BuildInputs, build_candidates

SOURCES = ("suffix", "trie")
drafts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 12), st.integers(0, 1)), max_size=8
)
batches = st.lists(drafts, min_size=1, max_size=3)
Drafts = list[list[tuple[list[int], int, int]]]


def inputs_of(batch: Drafts, max_depth: int = 9, table: RecycleTable = NO_RECYCLING) -> BuildInputs:
    every = [draft for of_one in batch for draft in of_one]
    tokens = np.full((len(every), 6), -1, np.int32)
    for row, (path, _, _) in zip(tokens, every, strict=True):
        row[: len(path)] = path
    return BuildInputs(
        DraftArrays(
            tokens,
            scores=np.array([score for _, score, _ in every], np.int32),
            weights=np.ones(len(every), np.float32),
            sources=np.array([source for _, _, source in every], np.int32),
            owners=np.repeat(np.arange(len(batch)), [len(drafts) for drafts in batch]).astype(np.int32),
        ),
        RootArrays(
            about=np.array([[2, 3, max_depth, place] for place in range(len(batch))], np.int32),
            runner_ups=np.full((len(batch), 7), -1, np.int32),
            runner_up_logits=np.zeros((len(batch), 7), np.float32),
            off_path=no_off_path(len(batch)),
            urgency=np.ones(len(batch), np.float32),
        ),
        NoiseArrays.unknown(len(batch)),
        table,
        AcceptanceModel(SOURCES),
    )


def limits(most: int, each: int | None = None, least: Seq[float] = (0.0,), vocab_size: int = 100) -> BuildLimits:
    each_most = np.full(3, most if each is None else each, np.int32)
    return BuildLimits(most, each_most, np.array(least, np.float32), vocab_size)


def paths(found: Candidates, owner: int) -> list[tuple[int, ...]]:
    """The paths of the chosen candidates of a request, in their order."""
    spelled: dict[int, tuple[int, ...]] = {owner: ()}
    chosen = []
    for node in found.chosen.tolist():
        if found.nodes[node, OWNER] == owner:
            spelled[node] = (*spelled[int(found.nodes[node, PARENT])], int(found.nodes[node, TOKEN]))  # parents first
            chosen.append(spelled[node])
    return chosen


@pytest.mark.slow
@given(batches)
@settings(max_examples=150)
def test_all_prefixes_of_all_drafts_and_nothing_else(batch: Drafts) -> None:
    found = build_candidates(inputs_of(batch), limits(500))
    for owner, of_one in enumerate(batch):
        expected = {tuple(path[:end]) for path, _, _ in of_one for end in range(1, len(path) + 1)}
        chosen = paths(found, owner)
        assert len(chosen) == len(set(chosen))
        assert set(chosen) == expected
    for node in found.chosen.tolist():
        sources = {s for path, _, s in batch[found.nodes[node, OWNER]] if _passes(found, node, path)}
        assert found.nodes[node, NUM_SOURCES] == len(sources)
        assert SOURCES[found.nodes[node, TOP_SOURCE]] in {SOURCES[s] for s in sources}


def _passes(found: Candidates, node: int, path: list[int]) -> bool:
    own: list[int] = []
    while found.nodes[node, PARENT] >= 0:
        own.insert(0, int(found.nodes[node, TOKEN]))
        node = int(found.nodes[node, PARENT])
    return path[: len(own)] == own


@given(batches, st.integers(0, 12), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=150)
def test_the_best_are_chosen_and_limits_hold(batch: Drafts, most: int, each: int, max_depth: int) -> None:
    everything = build_candidates(inputs_of(batch, max_depth), limits(500))
    found = build_candidates(inputs_of(batch, max_depth), limits(most, each))
    scores = found.scores[found.chosen]
    assert (np.diff(scores) <= 1e-6).all()
    assert len(found.chosen) <= most
    assert np.bincount(found.nodes[found.chosen, OWNER], minlength=1).max() <= each
    assert found.column(DEPTH).max() <= max_depth
    if each >= most:
        best = np.sort(everything.scores[everything.chosen])[::-1][:most]
        assert np.allclose(scores, best, atol=1e-6)
    above = build_candidates(inputs_of(batch, max_depth), limits(500, least=[0.2]))
    assert (above.scores[above.chosen] >= 0.2).all()
    assert len(above.chosen) == (everything.scores[everything.chosen] >= 0.2).sum()
    few = build_candidates(inputs_of(batch, max_depth), limits(500, least=[0.2, 0.2, 0.4, 0.2]))
    assert len(few.chosen) == (2 if len(above.chosen) > 2 and above.chosen_scores[2] < 0.4 else len(above.chosen))


def test_a_draft_ends_before_a_token_that_is_outside_the_vocabulary() -> None:
    batch: Drafts = [[([1, 2, 3], 5, 0), ([7, 1], 5, 1)]]
    assert set(paths(build_candidates(inputs_of(batch), limits(99, vocab_size=3)), 0)) == {(1,), (1, 2)}


def test_match_scores_outside_their_range_are_taken_for_the_nearest_one() -> None:
    for score, nearest in ((99, 15), (-7, 0)):
        wild, tame = (build_candidates(inputs_of([[([1], s, 0)]]), limits(9)) for s in (score, nearest))
        assert wild.scores.tolist() == tame.scores.tolist()


def test_two_sources_for_a_token_are_worth_more_than_one() -> None:
    alone = build_candidates(inputs_of([[([1], 5, 0)]]), limits(9))
    agreed = build_candidates(inputs_of([[([1], 5, 0), ([1], 5, 1)]]), limits(9))
    against = build_candidates(inputs_of([[([1], 5, 0), ([2], 5, 1)]]), limits(9))
    assert agreed.scores[1] > alone.scores[1] > against.scores[1]
    assert (alone.nodes[1, NUM_SOURCES], agreed.nodes[1, NUM_SOURCES]) == (1, 2)


def test_recycled_predictions_continue_every_path() -> None:
    table = RecycleTable(20, 64)
    top = np.array([[10, 11, 12, -1, -1, -1, -1, -1]], np.int32)
    logits = np.array([[9.0, 5, 1, 0, 0, 0, 0, 0]], np.float32)
    one = np.array
    table.learn(one([-1], np.int32), one([7], np.int32), top, logits)  # after 7, whatever was before
    table.learn(one([7], np.int32), one([10], np.int32), top + 3 * (top >= 0), logits)  # after the pair 7, 10
    found = build_candidates(inputs_of([[([7], 5, 0)]], table=table), limits(30))
    chosen = paths(found, 0)
    assert (7, 10, 13) in chosen
    assert (7, 11) in chosen
    assert (7, 12) in chosen
    assert chosen.index((7, 10)) < chosen.index((7, 11)) < chosen.index((7, 12))
    node = next(n for n in found.chosen if found.nodes[n, TOKEN] == 10 and found.nodes[n, DEPTH] == 2)
    assert found.nodes[node, TOP_SOURCE] == len(SOURCES)  # no source drafted it
    assert found.nodes[node, NUM_SOURCES] == 1


def test_runner_ups_are_candidates_for_the_first_token_only() -> None:
    inputs = inputs_of([[([1, 1], 5, 0)]])
    inputs.roots.runner_ups[0, :2] = 8, 9
    found = build_candidates(inputs, limits(30))
    assert {(8,), (9,)} <= set(paths(found, 0))
    assert not {path for path in paths(found, 0) if len(path) > 1 and path[-1] in (8, 9)}


def test_recycled_predictions_are_ranked_with_the_noise_they_meet() -> None:
    """argmax(p / noise): little noise makes a token win, whatever its rank was."""
    table = RecycleTable(40, 16)
    ids, logits = np.array([[7, 8, 9]], np.int32), np.array([[2.0, 1.5, 1.0]], np.float32)
    table.learn(np.array([2], np.int32), np.array([3], np.int32), ids, logits)  # after the last tokens of `inputs_of`
    inputs = inputs_of([[]], max_depth=1, table=table)
    unranked = paths(build_candidates(inputs, limits(9)), 0)
    assert unranked == [(7,), (8,), (9,)]
    for favoured in (7, 8, 9):
        upcoming = np.ones((2, 4, 40), np.float32)
        upcoming[1, 5 % 4, favoured] = 0.01  # row 1, position 5
        upcoming[1, 2, 7 + (favoured - 6) % 3] = 1e-6  # other positions do not matter
        one = np.array
        noise = NoiseArrays(upcoming, one([1], np.int32), one([5], np.int32), np.ones(1, np.float32))
        ranked = paths(build_candidates(replace(inputs, noise=noise), limits(9)), 0)
        assert ranked[0] == (favoured,)
    cold = NoiseArrays.unknown(1)
    cold.temperatures[0] = 0.05  # nearly greedy: the most likely token is nearly certain
    found, warm = (
        build_candidates(replace(inputs, noise=noise), limits(9)) for noise in (cold, NoiseArrays.unknown(1))
    )
    assert found.scores[found.chosen[0]] > warm.scores[warm.chosen[0]]


def test_rows_go_to_the_urgent_request() -> None:
    drafts = [[([4, 5, 6, 7], 6, 0)], [([4, 5, 6, 7], 6, 0)]]
    inputs = inputs_of(drafts)
    equal = build_candidates(inputs, limits(4))
    assert np.bincount(equal.nodes[equal.chosen, OWNER]).tolist() == [2, 2]
    inputs.roots = inputs.roots._replace(urgency=np.array([0.2, 1.8], np.float32))
    urgent = build_candidates(inputs, limits(4))
    assert np.bincount(urgent.nodes[urgent.chosen, OWNER], minlength=2).tolist() == [0, 4]
    assert np.allclose(urgent.chosen_scores, urgent.scores[urgent.chosen])  # estimates are not changed by it


def test_off_path_predictions_become_candidates_at_their_depth() -> None:
    inputs = inputs_of([[([7], 12, 0)], []])
    off_path = inputs.roots.off_path
    off_path[0, :, 0, 0] = 8, 1  # for the next token of the first request
    off_path[0, :, 1, 0] = 9, 1  # for the one behind it
    off_path[0, :, 1, 1] = 200, 1  # outside of the vocabulary
    found = build_candidates(inputs, limits(20))
    assert {path for path in paths(found, 0) if len(path) == 1} == {(7,), (8,)}
    assert {path for path in paths(found, 0) if len(path) == 2} == {(7, 9), (8, 9)}
    assert not paths(found, 1)


# Numbers of requests and of candidates, and least scores: with a step, and with a point where a larger step begins.
CASES = (
    (2, 30, (0.0,)),
    (7, 64, (0.01, 0.01, 0.05)),
    (23, 100, (0.002,)),
    (23, 400, (0.0,)),
    (23, 0, (0.0,)),
    (9, 120, (0.01,) * 40 + (0.06,) + (0.01,) * 79),
    (9, 120, (0.05,) + (0.02,) * 59 + (0.3,) * 60),
)


def test_the_trees_do_not_depend_on_the_threads_that_build_them() -> None:
    teams = HostTeam(0), HostTeam(3)
    rng = np.random.default_rng(0)
    table = RecycleTable(60, 256)
    for _ in range(12):
        before, tokens = rng.integers(0, 60, (2, 32)).astype(np.int32)
        top = np.argsort(rng.random((32, 60)), 1)[:, :8].astype(np.int32)
        table.learn(before, tokens, top, -np.sort(-rng.normal(3, 2, (32, 8)), 1).astype(np.float32))
    for size, most, least in CASES:
        texts = rng.integers(0, 60, (size, 3, 6)).tolist()
        inputs = inputs_of([[(path, int(rng.integers(1, 12)), 0) for path in of_one] for of_one in texts], table=table)
        inputs.roots.about[:, :2] = rng.integers(0, 60, (size, 2))
        inputs.roots = inputs.roots._replace(urgency=rng.uniform(0.1, 4, size).astype(np.float32))
        bounds = BuildLimits(most, np.full(size, 24, np.int32), np.array(least, np.float32), 60)
        alone = described(build_candidates(inputs, bounds), size)
        for team in teams:
            for parts in {2, min(size, 4)}:
                assert described(build_candidates(inputs, bounds, (team.address, parts)), size) == alone
    for team in teams:
        team.close()


def described(found: Candidates, size: int) -> list[object]:
    """What can be seen of candidates: the chosen ones, and all children of the expanded nodes with their features."""
    chosen = list(zip(found.owners.tolist(), found.chosen_scores.tolist(), found.urgency.tolist(), strict=True))
    children: list[object] = [paths(found, owner) for owner in range(size)]
    for node in [*range(size), *found.chosen.tolist()]:
        first, count = int(found.nodes[node, FIRST]), int(found.nodes[node, COUNT])
        own = slice(first, first + count) if first >= 0 else slice(0)
        children.append((found.nodes[own, TOKEN].tolist(), found.features[own].tolist(), found.scores[own].tolist()))
    return [chosen, children]
