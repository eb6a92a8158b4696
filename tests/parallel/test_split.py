"""Steps that are split over ranks: every result comes from one rank, which has all that it needs to compute it."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

import numpy as np
import pytest

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.drafters.lookahead import Lookahead, LookaheadDrafter
from lookfar.engine.costs import tree_plan
from lookfar.parallel.messages import Op, as_values, decode, decode_step, encode, encode_step, text_of
from lookfar.parallel.split import RankShare, branches, longest_held, share_units, split_step


def random_tree(rng: random.Random, nodes: int) -> DraftTree:
    parents = [rng.randrange(-1, node) if node else -1 for node in range(nodes)]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    rows = [[rng.randrange(90) for _ in parents], parents, depths, [0] * nodes, [1] * nodes]
    return DraftTree(np.array(rows, np.int32), np.ones(nodes, np.float32), ("some",))


def window(rng: random.Random, levels: int) -> tuple[LookaheadDrafter, list[int]]:
    drafter = LookaheadDrafter(Lookahead(window=5, ngram=4), [rng.randrange(90) for _ in range(6)])
    drafter.levels = [[rng.randrange(90) for _ in range(4 + (level > 0))] for level in range(levels)]
    return drafter, []


def random_step(seed: int, ranks: int) -> tuple[StepPlan, np.ndarray]:
    rng = random.Random(seed)
    requests, cached = [], []
    for kv in range(rng.randint(1, 3)):
        pending = np.array([rng.randrange(90) for _ in range(rng.randint(1, 5))])
        rows = RequestPlan(pending, rng.randrange(20), kv, complete=rng.random() < 0.8)
        if rows.complete:
            rows.tree = random_tree(rng, rng.randrange(14))
            if rng.random() < 0.5:
                rows.windows = (window(rng, rng.randint(1, 3))[0].window_rows(),)
        rows.predict = rng.randint(0, len(pending))
        requests.append(rows)
        own = [rows.num_cached + rng.randrange(len(pending)) for _ in range(ranks)]
        own[rng.randrange(ranks)] = rows.num_cached  # what all have is what the one with the least has
        cached.append(own)
    return StepPlan(requests, top_k=3), np.array(cached).T


def check(plan: StepPlan, shares: list[RankShare], cached: np.ndarray) -> None:
    needed = np.flatnonzero(np.concatenate([rows.needs_logits for rows in plan.requests]))
    assert sorted(np.concatenate([share.places for share in shares])) == needed.tolist()  # each from one rank
    for rank, share in enumerate(shares):
        for place, (whole, part) in enumerate(zip(plan.requests, share.plan.requests, strict=True)):
            rows = share.rows[place]
            assert part.kv == whole.kv
            assert part.num_cached == cached[rank, place]
            assert len(part) == len(rows)
            np.testing.assert_array_equal(part.tokens, whole.tokens[rows])
            np.testing.assert_array_equal(part.positions, whole.positions[rows])
            assert part.needs_logits[share.reported[place]].all()
            # A row sees the same tokens: those that are cached here, and those that are not.
            skipped = part.num_cached - whole.num_cached
            for own, row in enumerate(rows):
                seen = set(rows[part.visible[own]]) | set(range(skipped))
                assert seen == set(np.flatnonzero(whole.visible[row]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_sees_what_its_rows_need(ranks: int) -> None:
    for seed in range(60):
        plan, cached = random_step(seed, ranks)
        check(plan, split_step(plan, cached), cached)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_busiest_rank_has_as_few_rows_as_any_cut_allows(ranks: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        tree = random_tree(rng, 12)
        rows, ends = branches(tree.parents, int(tree.depths.sum()))
        fed = np.array([rng.randint(1, 4) for _ in range(ranks)])
        paths = np.split(rows, ends[:-1])

        def busiest(assigned: tuple[int, ...], paths=paths, fed=fed) -> int:
            own = [
                {node for path, r in zip(paths, assigned, strict=True) if r == rank for node in path}
                for rank in range(ranks)
            ]
            return max(int(fed[rank]) + len(nodes) for rank, nodes in enumerate(own))

        found = share_units(rows, ends, fed, len(tree))
        best = min(map(busiest, combinations_with_replacement(range(ranks), len(paths))))
        assert busiest(tuple(found)) == best


def test_leaves_come_in_depth_first_order() -> None:
    tree = DraftTree.from_paths([[1, 2], [5], [1, 3, 4], [1, 2, 9]])
    rows, ends = branches(tree.parents, int(tree.depths.sum()))
    paths = [tree.tokens[path[::-1]].tolist() for path in np.split(rows, ends[:-1])]
    assert paths == [[1, 2, 9], [1, 3, 4], [5]]


def test_a_window_is_split_by_columns_with_the_first_level_up_to_them() -> None:
    rows = RequestPlan(np.array([7]), 4, windows=(window(random.Random(0), 3)[0].window_rows(),))
    first, second = split_step(StepPlan([rows]), np.array([[4], [4]]))
    level = [0] * 4 + [1] * 5 + [2] * 5
    column = [1, 2, 3, 4, *range(5), *range(5)]
    held = [[(level[row - 1], column[row - 1]) for row in share.rows[0][1:]] for share in (first, second)]
    above = [{c for lvl, c in own if lvl == 1} for own in held]
    assert above[0] | above[1] == set(range(5))
    assert not above[0] & above[1]
    for own, columns in zip(held, above, strict=True):
        assert {c for lvl, c in own if lvl == 2} == columns
        assert {c for lvl, c in own if lvl == 0} == set(range(1, max(columns) + 1))


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_measured_steps_have_the_same_rows_on_every_rank(rows: int) -> None:
    plan = tree_plan(rows, 5, 90, ranks=3)
    shares = split_step(plan, np.full((3, 1), 5))
    assert [share.plan.lengths for share in shares] == [[rows]] * 3


def test_steps_survive_a_message() -> None:
    for seed in range(40):
        plan, cached = random_step(seed, 2)
        for share in split_step(plan, cached):
            again, reported = decode_step(encode_step(share))
            assert again.top_k == 3
            for rows, other, said, told in zip(
                share.plan.requests, again.requests, share.reported, reported, strict=True
            ):
                assert (rows.kv, rows.num_cached, rows.complete, rows.predict) == (
                    other.kv,
                    other.num_cached,
                    other.complete,
                    other.predict,
                )
                np.testing.assert_array_equal(rows.tokens, other.tokens)
                np.testing.assert_array_equal(rows.positions, other.positions)
                np.testing.assert_array_equal(rows.visible, other.visible)
                np.testing.assert_array_equal(rows.needs_logits, other.needs_logits)
                np.testing.assert_array_equal(said, told)


def test_operations_survive_a_message() -> None:
    message = np.concatenate([encode(Op.ABANDON, 1), encode(Op.FREE, 2, [3, 4, 5]), encode(Op.FORGET, 0)])
    found = [(op.code, op.cache, op.values.tolist()) for op in decode(message)]
    assert found == [(Op.ABANDON, 1, []), (Op.FREE, 2, [3, 4, 5]), (Op.FORGET, 0, [])]
    assert text_of(as_values("größer")) == "größer"


def test_an_accepted_path_is_kept_up_to_the_first_row_that_is_missing() -> None:
    rows = np.array([2, 3, 5, 8])
    assert longest_held(rows, [5, 8]) == [2, 3]
    assert longest_held(rows, [3, 4, 5]) == [1]
    assert longest_held(rows, [4]) == []
    assert longest_held(rows, [8, 9]) == [3]
