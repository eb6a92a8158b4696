"""The slot cache against a plain list of rows."""

from __future__ import annotations

import numpy as np
import torch

from lookfar.cache import SlotCache
from lookfar.tree import Plan, SequencePlan, TokenTree


def rows(cached: int, count: int) -> SequencePlan:
    """A sequence plan with a root and a chain of `count − 1` guesses."""
    return SequencePlan(np.array([0]), cached, tree=TokenTree.of([list(range(count - 1))]))


def states(*marks: list[int], width: int) -> torch.Tensor:
    """[batch, 2 heads, rows, 3] filled with one number a row; padding is −1."""
    padded = torch.tensor([[*row, *[-1] * (width - len(row))] for row in marks], dtype=torch.float32)
    return padded[:, None, :, None].expand(-1, 2, -1, 3)


def forward(cache: SlotCache, plan: Plan, *marks: list[int]) -> torch.Tensor:
    """What layer 1 returns for keys, one number a cell: [batch, cells]."""
    cache.begin(plan)
    new = states(*marks, width=plan.width)
    keys, values = cache.update(new, new + 0.5, layer_idx=1)
    assert torch.equal(values - keys, torch.full_like(keys, 0.5).where(keys != 0, values - keys))
    return keys[:, 0, :, 0]


def test_rows_go_behind_the_committed_ones_and_accepted_ones_move_down() -> None:
    cache = SlotCache(slots=1, capacity=16)
    assert forward(cache, Plan([rows(0, 5)]), [10, 11, 12, 13, 14]).tolist() == [[10, 11, 12, 13, 14]]
    cache.commit(0, 0, [0, 2, 4])
    assert forward(cache, Plan([rows(3, 2)]), [20, 21]).tolist() == [[10, 12, 14, 20, 21]]
    cache.commit(0, 3, [0, 1])
    assert forward(cache, Plan([rows(5, 1)]), [30]).tolist() == [[10, 12, 14, 20, 21, 30]]


def test_ragged_sequences_write_at_their_own_ends() -> None:
    cache = SlotCache(slots=2, capacity=16)
    forward(cache, Plan([rows(0, 3)], first_slot=0), [1, 2, 3])
    forward(cache, Plan([rows(0, 1)], first_slot=1), [7])
    view = forward(cache, Plan([rows(3, 1), rows(1, 3)]), [4], [8, 9, 10])
    assert view[0, :4].tolist() == [1, 2, 3, 4]
    assert view[1, :4].tolist() == [7, 8, 9, 10]
    cache.commit(1, 1, [0, 2])
    view = forward(cache, Plan([rows(4, 1), rows(3, 1)]), [5], [11])
    assert view[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert view[1, :4].tolist() == [7, 8, 10, 11]


def test_padding_never_overwrites_a_cell_nor_leaves_the_buffer() -> None:
    cache = SlotCache(slots=2, capacity=6)
    forward(cache, Plan([rows(0, 5)], first_slot=0), [1, 2, 3, 4, 5])
    # Slot 0 has one row at cell 5, and three padding rows that would reach past the end.
    view = forward(cache, Plan([rows(5, 1), rows(0, 4)]), [6], [7, 8, 9, 10])
    assert view[0, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert view[1, :4].tolist() == [7, 8, 9, 10]
    assert view.shape[1] == cache.kv_length == 7


def test_a_slot_can_move() -> None:
    cache = SlotCache(slots=2, capacity=8)
    forward(cache, Plan([rows(0, 3)], first_slot=1), [1, 2, 3])
    cache.move(source=1, target=0, length=3)
    assert forward(cache, Plan([rows(3, 1)], first_slot=0), [4]).tolist() == [[1, 2, 3, 4]]


def test_a_slot_moves_with_what_is_still_to_be_moved_in_it() -> None:
    cache = SlotCache(slots=3, capacity=8)
    forward(cache, Plan([rows(0, 5), rows(0, 5), rows(0, 5)]), [1, 2, 3, 4, 5], [9, 9, 9, 9, 9], [6, 7, 8, 9, 10])
    cache.commit(1, 0, [0, 4])  # of a text that has ended: nobody needs it
    cache.commit(2, 0, [0, 2, 4])
    cache.copy(source=2, target=0, length=3)
    cache.move(source=2, target=1, length=3)
    assert 2 not in cache._moves
    view = forward(cache, Plan([rows(3, 1), rows(3, 1)]), [0], [0])
    assert view[:, :4].tolist() == [[6, 8, 10, 0], [6, 8, 10, 0]]


def test_layers_that_are_never_written_are_left_alone() -> None:
    cache = SlotCache(slots=1, capacity=8)
    forward(cache, Plan([rows(0, 4)]), [1, 2, 3, 4])
    cache.commit(0, 0, [0, 3])  # layer 0 has no buffers
    assert not cache.layers[0].is_initialized
    assert cache.nbytes == 2 * (2 * 9 * 3) * 4
    assert cache.get_seq_length() == 0
