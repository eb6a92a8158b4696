"""Draft trees and step plans: prefixes are shared, and every row sees exactly what it should."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from lookfar.core.plan import RequestPlan, StepPlan, WindowRows
from lookfar.core.tree import ROOT, DraftTree

paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8)


def spelled(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The tokens from the last token of the text to a node."""
    return () if node == ROOT else (*spelled(tree, int(tree.parents[node])), int(tree.tokens[node]))


@given(paths)
def test_every_prefix_is_one_node(drafts: list[list[int]]) -> None:
    tree = DraftTree.from_paths(drafts)
    prefixes = {tuple(draft[:end]) for draft in drafts for end in range(1, len(draft) + 1)}
    assert sorted(spelled(tree, node) for node in range(len(tree))) == sorted(prefixes)
    assert all(tree.parents[node] < node for node in range(len(tree)))
    assert all(tree.depths[node] == len(spelled(tree, node)) for node in range(len(tree)))


@given(paths, st.integers(1, 4), st.integers(0, 9))
@settings(max_examples=50)
def test_a_node_sees_the_pending_tokens_and_its_own_path(drafts: list[list[int]], pending: int, cached: int) -> None:
    tree = DraftTree.from_paths(drafts)
    rows = RequestPlan(np.arange(pending), cached, tree=tree)
    for node in range(len(tree)):
        seen = {other for other in range(len(tree)) if rows.visible[rows.node_row(node), rows.node_row(other)]}
        own = spelled(tree, node)
        assert seen == {other for other in range(len(tree)) if own[: tree.depths[other]] == spelled(tree, other)}
        assert rows.visible[rows.node_row(node), :pending].all()
        assert rows.positions[rows.node_row(node)] == cached + pending - 1 + tree.depths[node]
    assert (rows.visible[:pending, :pending] == np.tri(pending, dtype=bool)).all()
    assert not rows.visible[:pending, pending:].any()


def test_logits_are_needed_for_the_last_token_the_nodes_and_wanted_window_rows_only() -> None:
    window = WindowRows(np.array([7, 8]), np.array([1, 2]), np.tri(2, dtype=bool), np.array([False, True]))
    rows = RequestPlan(np.array([1, 2, 3]), 10, tree=DraftTree.from_paths([[4, 5]]), windows=(window,))
    assert rows.needs_logits.tolist() == [False, False, True, True, True, False, True]
    assert rows.tokens.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert rows.positions.tolist() == [10, 11, 12, 13, 14, 13, 14]
    chunk = RequestPlan(np.array([1, 2, 3]), 10, complete=False)
    assert not chunk.needs_logits.any()


def test_window_rows_and_tree_nodes_never_see_each_other() -> None:
    window = WindowRows(np.array([7]), np.array([1]), np.ones((1, 1), bool), np.ones(1, bool))
    rows = RequestPlan(np.array([1]), 0, tree=DraftTree.from_paths([[4, 5]]), windows=(window, window))
    assert rows.visible[3].tolist() == [True, False, False, True, False]
    assert rows.visible[4].tolist() == [True, False, False, False, True]
    assert rows.window_rows(0) == slice(3, 4)
    assert rows.window_rows(1) == slice(4, 5)


def test_a_batch_is_padded_and_has_the_union_of_the_logit_rows() -> None:
    short = RequestPlan(np.array([1]), 5)
    long = RequestPlan(np.array([1, 2]), 0, tree=DraftTree.from_paths([[3]]))
    plan = StepPlan([short, long])
    assert plan.tokens.tolist() == [[1, 0, 0], [1, 2, 3]]
    assert plan.positions.tolist() == [[5, 5, 5], [0, 1, 2]]
    assert plan.logit_rows.tolist() == [0, 1, 2]
    # Padding rows see what the last token sees, so that no row is without a key.
    assert plan.visible[0].tolist() == [[True, False, False]] * 3


def test_a_path_is_followed_as_far_as_the_tree_holds_it() -> None:
    tree = DraftTree.from_paths([[1, 2, 3], [1, 4]])
    assert tree.path_of([1, 2, 9]) == [0, 1]
    assert tree.path_of([1, 4, 5]) == [0, 3]
    assert tree.path_of([7]) == tree.path_of([]) == []
