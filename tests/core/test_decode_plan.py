"""Plans of decoding steps: their arrays are those of the plans of their requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lookfar.core.decode_plan import DecodePlan, DecodingRequests, LastTokens
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree, DraftTrees

PATHS: list[list[list[int]]] = [[[5, 6], [5, 7, 8]], [], [[9]]]


def decoding() -> DecodingRequests:
    """Three requests: one wants predictions, one has embeddings, one has positions of its own."""
    last, embeds = np.zeros(1, np.int64), np.zeros((2, 4))
    likes = [RequestPlan(last, 0, 11, predict=1), RequestPlan(last, 0, 12, embeds=embeds)]
    return DecodingRequests([*likes, RequestPlan(last, 0, 13, position_offset=4)])


@pytest.mark.parametrize("drafted", [False, True])
def test_the_arrays_are_those_of_the_requests(drafted: bool) -> None:
    trees = [DraftTree.from_paths(paths) if drafted else DraftTree.from_paths([]) for paths in PATHS]
    together = DraftTrees.of(trees) if drafted else None
    plan = DecodePlan(decoding(), LastTokens(np.array([1, 2, 3]), np.array([20, 30, 40])), together, top_k=8)
    one_by_one = [
        RequestPlan(np.array([1]), 20, 11, predict=1, tree=trees[0]),
        RequestPlan(np.array([2]), 30, 12, tree=trees[1], embeds=np.zeros((2, 4))),
        RequestPlan(np.array([3]), 40, 13, tree=trees[2], position_offset=4),
    ]
    check(plan, StepPlan(one_by_one, top_k=8))
    assert plan.requests[1].embeds is not None


def test_some_requests_feed_their_prompts() -> None:
    """A chunk of a prompt, after which nothing is chosen, beside one whose prompt ends and one that decodes."""
    trees = [DraftTree.from_paths(paths) for paths in ([], PATHS[0], PATHS[2])]
    sampler: Any = object()
    chunk = RequestPlan(np.array([7, 8, 9]), 4, 11, complete=False, predict=2, sampler=sampler)
    end = RequestPlan(np.array([5, 6]), 30, 12, predict=2, embeds=np.zeros((2, 4)), sampler=sampler)
    likes = [replace(chunk, complete=True), replace(end, predict=0), RequestPlan(np.zeros(1, np.int64), 0, 13)]
    fed = LastTokens(np.array([77, 6, 3]), np.array([4, 30, 40]), {0: replace(chunk), 1: replace(end)})
    plan = DecodePlan(DecodingRequests(likes), fed, DraftTrees.of(trees), top_k=8)
    last = RequestPlan(np.array([3]), 40, 13, tree=trees[2])
    check(plan, StepPlan([replace(chunk, tree=trees[0]), replace(end, tree=trees[1]), last], top_k=8))
    assert plan.prefilled == [0, 1]
    assert DecodingRequests(likes).complete == [True] * 3  # what plans have in common does not change


def check(plan: DecodePlan, expected: StepPlan) -> None:
    for name in ("lengths", "width", "batch", "handles", "num_pending", "complete", "samplers", "has_embeds", "top_k"):
        assert getattr(plan, name) == getattr(expected, name), name
    for name in ("num_cached", "num_rows", "position_offsets", "tokens", "positions", "logit_rows", "visible"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), name)
    for own, other in zip(plan.flat, expected.flat, strict=True):
        np.testing.assert_array_equal(own, other)
        assert own.dtype == other.dtype
        assert own.flags.c_contiguous
    assert plan.is_causal == expected.is_causal
    assert not plan.has_windows


def test_sources_are_counted_for_every_tree() -> None:
    columns = np.array([[1, 2, 3, 4], [-1, 0, -1, -1], [1, 2, 1, 1], [0, 2, 2, 1], [1, 1, 1, 1]], np.int32)
    trees = DraftTrees(columns, np.ones(4, np.float32), [0, 3, 3, 4], ("suffix", "store", "recycle"))
    assert trees.count_sources() == [[1, 0, 2], [0, 0, 0], [0, 1, 0]]
