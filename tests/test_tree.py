"""Trees and plans: prefixes shared, and every row sees exactly what it should."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from lookfar.tree import ROOT, Plan, Riders, SequencePlan, TokenTree

paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8)


def spelled(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    return () if node == ROOT else (*spelled(tree, int(tree.parents[node])), int(tree.tokens[node]))


@given(paths)
def test_every_prefix_is_one_node(drafts: list[list[int]]) -> None:
    tree = TokenTree.of(drafts)
    prefixes = {tuple(draft[:end]) for draft in drafts for end in range(1, len(draft) + 1)}
    assert sorted(spelled(tree, node) for node in range(len(tree))) == sorted(prefixes)
    assert all(tree.parents[node] < node for node in range(len(tree)))
    assert all(tree.depths[node] == len(spelled(tree, node)) for node in range(len(tree)))


@given(paths, st.integers(1, 4), st.integers(0, 9))
@settings(max_examples=50)
def test_a_node_sees_the_chain_and_its_own_path(drafts: list[list[int]], chain: int, cached: int) -> None:
    tree = TokenTree.of(drafts)
    rows = SequencePlan(np.arange(chain), cached, tree=tree)
    for node in range(len(tree)):
        seen = {other for other in range(len(tree)) if rows.visible[rows.node_row(node), rows.node_row(other)]}
        own = spelled(tree, node)
        assert seen == {other for other in range(len(tree)) if own[: tree.depths[other]] == spelled(tree, other)}
        assert rows.visible[rows.node_row(node), :chain].all()
        assert rows.positions[rows.node_row(node)] == cached + chain - 1 + tree.depths[node]
    assert (rows.visible[:chain, :chain] == np.tri(chain, dtype=bool)).all()
    assert not rows.visible[:chain, chain:].any()


def test_logits_are_wanted_for_the_root_the_nodes_and_chosen_riders_only() -> None:
    riders = Riders(np.array([7, 8]), np.array([1, 2]), np.tri(2, dtype=bool), np.array([False, True]))
    rows = SequencePlan(np.array([1, 2, 3]), 10, tree=TokenTree.of([[4, 5]]), riders=(riders,))
    assert rows.wanted.tolist() == [False, False, True, True, True, False, True]
    assert rows.tokens.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert rows.positions.tolist() == [10, 11, 12, 13, 14, 13, 14]
    piece = SequencePlan(np.array([1, 2, 3]), 10, complete=False)
    assert not piece.wanted.any()


def test_riders_and_guesses_never_see_each_other() -> None:
    riders = Riders(np.array([7]), np.array([1]), np.ones((1, 1), bool), np.ones(1, bool))
    rows = SequencePlan(np.array([1]), 0, tree=TokenTree.of([[4, 5]]), riders=(riders, riders))
    assert rows.visible[3].tolist() == [True, False, False, True, False]
    assert rows.visible[4].tolist() == [True, False, False, False, True]
    assert rows.rider_rows(0) == slice(3, 4)
    assert rows.rider_rows(1) == slice(4, 5)


def test_a_batch_is_padded_and_keeps_the_union_of_wanted_rows() -> None:
    short = SequencePlan(np.array([1]), 5)
    long = SequencePlan(np.array([1, 2]), 0, tree=TokenTree.of([[3]]))
    plan = Plan([short, long])
    assert plan.tokens.tolist() == [[1, 0, 0], [1, 2, 3]]
    assert plan.positions.tolist() == [[5, 5, 5], [0, 1, 2]]
    assert plan.kept.tolist() == [0, 1, 2]
    assert plan.kv_length == 5 + 3
    # Padding rows see what the root sees, so that no row is without a key.
    assert plan.visible[0].tolist() == [[True, False, False]] * 3
