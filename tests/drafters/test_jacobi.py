"""Jacobi iteration: the block becomes the model's own answers, shifted by what was settled."""

from __future__ import annotations

import numpy as np

from lookfar.core.tree import DraftTree
from lookfar.drafters.base import Outcome
from lookfar.drafters.jacobi import Jacobi, JacobiDrafter


def outcome(draft: list[int], choices: list[int], emitted: list[int]) -> Outcome:
    return Outcome(emitted, DraftTree.from_paths([draft]), np.array(choices), np.zeros(0, np.int64))


def test_it_starts_from_the_end_of_the_prompt() -> None:
    assert JacobiDrafter(Jacobi(block=3), [1, 2, 3, 4]).block == [2, 3, 4]
    assert JacobiDrafter(Jacobi(block=3), [1]).block == [1, 1, 1]


def test_nothing_settled_but_the_first() -> None:
    drafter = JacobiDrafter(Jacobi(block=3), [7, 8, 9])
    # Choices after the last token and the three draft tokens: the first is emitted, the others are the next block.
    drafter.observe([7, 8, 9, 20], outcome([7, 8, 9], [20, 21, 22, 23], emitted=[20]))
    assert drafter.block == [21, 22, 23]


def test_a_settled_prefix_moves_the_block_on() -> None:
    drafter = JacobiDrafter(Jacobi(block=3), [7, 8, 9])
    drafter.observe([7, 8, 9, 7, 8, 30], outcome([7, 8, 9], [7, 8, 30, 31], emitted=[7, 8, 30]))
    assert drafter.block == [31, 31, 31]


def test_all_settled() -> None:
    drafter = JacobiDrafter(Jacobi(block=3), [7, 8, 9])
    drafter.observe([7, 8, 9, 7, 8, 9, 5], outcome([7, 8, 9], [7, 8, 9, 5], emitted=[7, 8, 9, 5]))
    assert drafter.block == [5, 5, 5]


def test_a_block_that_was_cut_still_moves_on() -> None:
    drafter = JacobiDrafter(Jacobi(block=3), [7, 8, 9])
    drafter.observe([7, 8, 9, 20], outcome([7], [20, 21], emitted=[20]))
    assert drafter.block == [21, 21, 21]
