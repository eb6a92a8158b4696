"""The slot cache against a plain list of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.errors import CapacityError
from lookfar.kernels.row_table import MAX_PATH
from lookfar.kvcache.base import kv_of
from lookfar.kvcache.slots import SlotKVCache
from lookfar.runners.cuda_graph.graph_step import set_moves


def slots(count: int, capacity: int) -> tuple[SlotKVCache, list[int]]:
    """A cache whose slots are all taken, and their handles."""
    cache = SlotKVCache(count, capacity)
    return cache, [cache.allocate()[0] for _ in range(count)]


def rows(kv: int, num_cached: int, count: int) -> RequestPlan:
    """A last token and a draft of `count − 1` tokens."""
    return RequestPlan(np.array([0]), num_cached, kv, tree=DraftTree.from_paths([list(range(count - 1))]))


def states(*marks: list[int], width: int) -> torch.Tensor:
    """[batch, 2 heads, rows, 3] filled with one number for each row; padding is −1."""
    padded = torch.tensor([[*row, *[-1] * (width - len(row))] for row in marks], dtype=torch.float32)
    return padded[:, None, :, None].expand(-1, 2, -1, 3)


def forward(cache: SlotKVCache, plan: StepPlan, *marks: list[int]) -> torch.Tensor:
    """What layer 1 returns for keys, one number for each position: [batch, positions]."""
    new = states(*marks, width=plan.width)
    keys, values = cache.writer(plan).update(new, new + 0.5, layer_idx=1)
    assert torch.equal(values - keys, torch.full_like(keys, 0.5).where(keys != 0, values - keys))
    return keys[:, 0, :, 0]


def test_rows_go_behind_the_committed_ones_and_accepted_ones_move_down() -> None:
    cache, (kv,) = slots(1, 16)
    assert forward(cache, StepPlan([rows(kv, 0, 5)]), [10, 11, 12, 13, 14]).tolist() == [[10, 11, 12, 13, 14]]
    assert cache.commit(kv, 1, [2, 4]) == 3
    assert forward(cache, StepPlan([rows(kv, 3, 2)]), [20, 21]).tolist() == [[10, 12, 14, 20, 21]]
    assert cache.commit(kv, 2) == 5
    assert forward(cache, StepPlan([rows(kv, 5, 1)]), [30]).tolist() == [[10, 12, 14, 20, 21, 30]]


def test_ragged_requests_write_at_their_own_ends() -> None:
    cache, (one, two) = slots(2, 16)
    forward(cache, StepPlan([rows(one, 0, 3)]), [1, 2, 3])
    cache.commit(one, 3)
    forward(cache, StepPlan([rows(two, 0, 1)]), [7])
    cache.commit(two, 1)
    view = forward(cache, StepPlan([rows(one, 3, 1), rows(two, 1, 3)]), [4], [8, 9, 10])
    assert view[0, :4].tolist() == [1, 2, 3, 4]
    assert view[1, :4].tolist() == [7, 8, 9, 10]
    cache.commit(one, 1)
    assert cache.commit(two, 1, [2]) == 3
    view = forward(cache, StepPlan([rows(one, 4, 1), rows(two, 3, 1)]), [5], [11])
    assert view[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert view[1, :4].tolist() == [7, 8, 10, 11]


def test_padding_never_overwrites_a_position_nor_leaves_the_buffer() -> None:
    cache, (one, two) = slots(2, 6)
    forward(cache, StepPlan([rows(one, 0, 5)]), [1, 2, 3, 4, 5])
    # The first request has one row at position 5, and three padding rows that would reach past the end.
    view = forward(cache, StepPlan([rows(one, 5, 1), rows(two, 0, 4)]), [6], [7, 8, 9, 10])
    assert view[0, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert view[1, :4].tolist() == [7, 8, 9, 10]
    assert view.shape[1] == cache.buffers.kv_length == 7


def test_the_last_request_moves_into_the_gap() -> None:
    cache, (one, two) = slots(2, 8)
    forward(cache, StepPlan([rows(two, 0, 3)]), [1, 2, 3])
    cache.commit(two, 3)
    cache.free(one)
    assert cache.order == [two]
    assert cache.slot_of(two) == 0
    assert forward(cache, StepPlan([rows(two, 3, 1)]), [4]).tolist() == [[1, 2, 3, 4]]


def test_gaps_are_filled_by_the_next_requests_and_closed_for_padded_steps() -> None:
    cache = SlotKVCache(4, 8, leaves_gaps=True)
    one, two, three, four = (cache.allocate()[0] for _ in range(4))
    marks = [[10, 11], [20, 21], [30, 31], [40, 41]]
    forward(cache, StepPlan([rows(kv, 0, 2) for kv in (one, two, three, four)]), *marks)
    for kv in (one, two, three, four):
        cache.commit(kv, 2)
    cache.free(one)
    cache.free(three)
    assert (cache.order, cache.slot_of(two), cache.slot_of(four)) == ([two, four], 1, 3)
    assert cache.has_room(8)
    five, _ = cache.allocate()
    assert (cache.order, cache.slot_of(five)) == ([five, two, four], 0)
    view = forward(cache, StepPlan([rows(five, 0, 1), rows(two, 2, 1), rows(four, 2, 1)]), [50], [22], [42])
    assert view[0, 0] == 50
    assert view[1:, :3].tolist() == [[20, 21, 22], [40, 41, 42]]
    assert [cache.slot_of(kv) for kv in cache.order] == [0, 1, 2]
    cache.commit(two, 1)
    cache.free(four)
    cache.free(five)
    assert cache.order == [two]
    assert [cache.slot_of(cache.allocate()[0]) for _ in range(3)] == [0, 2, 3]
    with pytest.raises(CapacityError):
        cache.allocate()


def test_a_gap_keeps_its_text_for_a_prompt_that_begins_like_it() -> None:
    cache = SlotKVCache(3, 8, leaves_gaps=True)
    one, two = (cache.allocate()[0] for _ in range(2))
    forward(cache, StepPlan([rows(one, 0, 3), rows(two, 0, 1)]), [1, 2, 3], [9])
    cache.commit(one, 3)
    cache.commit(two, 1)
    cache.free(one, [7, 8, 9])
    again, reused = cache.allocate([7, 8, 5, 6])
    assert (cache.slot_of(again), reused) == (0, 2)
    assert forward(cache, StepPlan([rows(again, 2, 1), rows(two, 1, 1)]), [5], [9])[0, :3].tolist() == [1, 2, 5]


def test_a_request_moves_with_the_moves_that_are_noted_for_it() -> None:
    cache, (one, two, three) = slots(3, 8)
    plan = StepPlan([rows(one, 0, 5), rows(two, 0, 5), rows(three, 0, 5)])
    forward(cache, plan, [1, 2, 3, 4, 5], [9, 9, 9, 9, 9], [6, 7, 8, 9, 10])
    cache.commit(one, 2)
    cache.commit(two, 1, [4])  # of a request that ends
    cache.commit(three, 1, [3])
    cache.free(two)
    view = forward(cache, StepPlan([rows(one, 2, 1), rows(three, 2, 1)]), [50], [60])
    assert view[:, :3].tolist() == [[1, 2, 50], [6, 9, 60]]


def test_noted_moves_are_handed_over_for_a_kernel_to_carry_out() -> None:
    cache, (one, two, three) = slots(3, 12)
    plan = StepPlan([rows(one, 0, 5), rows(two, 0, 5), rows(three, 0, 5)])
    forward(cache, plan, [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15])
    cache.commit(one, 1, [2, 4])
    cache.commit(two, 3)  # where they belong already
    cache.commit(three, 2, [4])
    about, sources = cache.take_moves(2, 2)
    assert about.tolist() == [[0, 2, 1], [2, 1, 2]]
    assert sources.tolist() == [2, 4, 4]
    table = np.full((3, 1 + 2 * MAX_PATH), 77, np.int32)
    set_moves(table, about, sources)
    assert table[:2, 0].tolist() == [0, 2]
    assert table[2, 0] == -1
    assert table[0, 1:4].tolist() == [2, 4, -1]
    assert table[0, 1 + MAX_PATH : 4 + MAX_PATH].tolist() == [1, 2, -1]
    assert table[1, [1, 2, 1 + MAX_PATH, 2 + MAX_PATH]].tolist() == [4, -1, 2, -1]
    about, sources = cache.take_moves(2, 2)
    assert (about.shape, len(sources)) == ((0, 3), 0)


@pytest.mark.parametrize("limits", [(1, 9), (9, 1)])
def test_moves_that_do_not_fit_are_carried_out_at_once(limits: tuple[int, int]) -> None:
    cache, (one, two) = slots(2, 12)
    forward(cache, StepPlan([rows(one, 0, 5), rows(two, 0, 5)]), [1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    cache.commit(one, 1, [2, 4])
    cache.commit(two, 1, [3])
    assert not len(cache.take_moves(*limits)[0])
    view = forward(cache, StepPlan([rows(one, 3, 1), rows(two, 2, 1)]), [50], [60])
    assert view[0, :4].tolist() == [1, 3, 5, 50]
    assert view[1, :3].tolist() == [6, 9, 60]


def test_a_fork_starts_with_a_copy() -> None:
    cache = SlotKVCache(2, 8)
    one, _ = cache.allocate()
    forward(cache, StepPlan([rows(one, 0, 5)]), [1, 2, 3, 4, 5])
    cache.commit(one, 1, [2, 4])
    two = cache.fork(one, 2)
    view = forward(cache, StepPlan([rows(one, 3, 1), rows(two, 2, 1)]), [50], [60])
    assert view[0, :4].tolist() == [1, 3, 5, 50]
    assert view[1, :3].tolist() == [1, 3, 60]
    with pytest.raises(CapacityError, match="All 2 slots"):
        cache.fork(one, 2)


def test_a_prompt_starts_from_what_an_earlier_request_left() -> None:
    cache = SlotKVCache(2, 8)
    one, _ = cache.allocate()
    forward(cache, StepPlan([rows(one, 0, 4)]), [1, 2, 3, 4])
    cache.commit(one, 4)
    cache.free(one, [11, 12, 13, 14])
    assert cache.allocate([21, 22])[1] == 0  # another text
    cache.free(cache.order[0])
    one, reused = cache.allocate([11, 12, 13, 14])
    assert reused == 0  # the slot was taken meanwhile, so nothing is left of it


def test_reused_positions_are_copied_to_another_slot() -> None:
    cache, (one, two) = slots(2, 8)
    forward(cache, StepPlan([rows(one, 0, 1), rows(two, 0, 4)]), [7], [1, 2, 3, 4])
    cache.commit(one, 1)
    cache.commit(two, 4)
    cache.free(two, [11, 12, 13, 14])
    cache.free(one, [17])
    handle, reused = cache.allocate([11, 12, 13, 99])
    assert (cache.slot_of(handle), reused) == (0, 3)
    assert forward(cache, StepPlan([rows(handle, 3, 1)]), [5]).tolist() == [[1, 2, 3, 5]]
    cache.free(handle, [11, 12, 13, 14])
    assert cache.allocate([11, 12, 13, 14])[1] == 3  # the logits after the last token are needed


def test_what_is_exported_can_be_imported() -> None:
    cache, (one, two) = slots(2, 8)
    forward(cache, StepPlan([rows(one, 0, 5)]), [1, 2, 3, 4, 5])
    cache.commit(one, 1, [2, 4])
    exported = cache.export_kv(one, 0, 3)
    assert exported.layers[0] is None  # layer 0 was never used
    assert cache.import_kv(two, exported) == 3
    assert forward(cache, StepPlan([rows(two, 3, 1)]), [6]).tolist() == [[1, 3, 5, 6]]
    past = DynamicCache()
    past.update(torch.ones(1, 2, 4, 3), torch.zeros(1, 2, 4, 3), 1)
    assert cache.import_kv(one, kv_of(past)) == 4


def test_a_cache_grows_with_its_contents_or_without() -> None:
    cache = SlotKVCache()
    cache.reserve(1, 10, most=4, keep=False)
    assert (cache.slots, cache.capacity) == (1, 64)
    one, _ = cache.allocate()
    forward(cache, StepPlan([rows(one, 0, 2)]), [1, 2])
    cache.commit(one, 2)
    before = cache.buffers.generation
    cache.reserve(2, 100, most=4, keep=True)
    assert (cache.slots, cache.capacity) == (2, 128)
    assert cache.buffers.generation != before
    assert forward(cache, StepPlan([rows(one, 2, 1)]), [3]).tolist() == [[1, 2, 3]]
    cache.reserve(1, 50, most=4, keep=False)  # large enough
    assert cache.slots == 2
    cache.free(one, [5, 6])
    cache.reserve(1, 200, most=4, keep=False)
    assert (cache.slots, cache.capacity) == (1, 256)
    assert cache.nbytes == 0


def test_abandoned_requests_leave_no_trace() -> None:
    cache, (one, two) = slots(2, 8)
    forward(cache, StepPlan([rows(one, 0, 5), rows(two, 0, 5)]), [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    cache.commit(two, 1, [4])
    cache.abandon()
    assert list(cache.order) == []
    again, reused = cache.allocate([1, 2, 3])
    assert (cache.slot_of(again), reused) == (0, 0)
    assert forward(cache, StepPlan([rows(again, 0, 2)]), [8, 9]).tolist() == [[8, 9]]
