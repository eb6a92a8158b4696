"""Predictions of rejected rows are merged by position, each by the probability of its path."""

from __future__ import annotations

import numpy as np
import pytest

from lookfar.core.jit import jit
from lookfar.retrieval.off_path import (
    CLASSES,
    KINDS,
    PER_POSITION,
    POSITIONS,
    TOKENS,
    merge_off_path,
    new_merge_room,
    room_of,
)

# The model expects 10 or 11 after the last token. A draft tree holds 10, 11, and 20 behind 10.
TREE = np.array([[10, 11, 20], [-1, -1, 0], [1, 1, 2], [0, 0, 0], [1, 1, 1]], np.int32)
TOP_IDS = np.array([[10, 11], [20, 21], [22, 23], [30, 31]], np.int32)  # after the last token, then after the nodes
TOP_LOGITS = np.log(np.array([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.8, 0.2]], np.float32))


@jit
def merge_tree(merged, tree, top, last):  # type: ignore[no-untyped-def]
    merge_off_path(merged, tree, top, (1, last), room_of(new_merge_room(tree.shape[1], 2), 1))


def merge(last: int, tree: np.ndarray = TREE) -> np.ndarray:
    merged = np.full((2, POSITIONS, PER_POSITION), 7, np.int32)
    merge_tree(merged, tree, (TOP_IDS, TOP_LOGITS), last)
    return merged


def test_rejected_rows_predict_what_follows_the_bonus_token() -> None:
    merged = merge(-1)  # nothing was accepted: the bonus token is at the position of 10 and 11
    assert merged[TOKENS, 0, :4].tolist() == [20, 22, 23, 21]  # 0.6 * 0.9, 0.4 * 0.7, 0.4 * 0.3, 0.6 * 0.1
    assert merged[TOKENS, 1, :2].tolist() == [30, 31]
    assert (merged[KINDS, 0, 4:] == 0).all()
    assert (merged[KINDS, 2] == 0).all()


def test_kinds_order_tokens_by_their_share() -> None:
    kinds = merge(-1)[KINDS, 0, :4]
    assert (np.diff(kinds) >= 0).all()  # a lower class is a higher share
    assert (kinds > 2 * CLASSES).all()  # all paths together are likely


def test_accepted_rows_are_left_out() -> None:
    merged = merge(0)  # 10 was accepted, and 20 was not: another token is the bonus
    assert merged[TOKENS, 0, :2].tolist() == [30, 31]
    assert (merged[KINDS, 1] == 0).all()


def test_a_full_match_leaves_nothing() -> None:
    assert (merge(2)[KINDS] == 0).all()


def test_without_a_tree_there_is_nothing() -> None:
    assert (merge(-1, TREE[:, :0]) == 0).all()


def test_unlikely_paths_do_not_count() -> None:
    tree = TREE.copy()
    tree[0, 1] = 99  # which the model does not expect at all
    assert merge(-1, tree)[TOKENS, 0, :2].tolist() == [20, 21]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_do_no_harm(value: float) -> None:
    merged = np.zeros((2, POSITIONS, PER_POSITION), np.int32)
    logits = np.full_like(TOP_LOGITS, value)
    merge_tree(merged, TREE, (TOP_IDS, logits), -1)
    assert set(merged[TOKENS].ravel().tolist()) <= {0, *TOP_IDS.ravel().tolist()}
