"""The cache of recurrent models: a step is kept as a whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3NextConfig

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.kvcache.recurrent import RecurrentKVCache

CONFIG = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def slots(count: int) -> tuple[RecurrentKVCache, list[int]]:
    cache = RecurrentKVCache(CONFIG)
    cache.reserve(count, 64, most=count, keep=False)
    return cache, [cache.allocate()[0] for _ in range(count)]


def feed(cache: RecurrentKVCache, *fed: tuple[int, int, list[int]]) -> list[float]:
    """A forward pass whose state is the sum of all tokens; returns the state that each request began with."""
    plan = StepPlan([RequestPlan(np.array(tokens), cached, handle) for handle, cached, tokens in fed])
    writer = cache.writer(plan)
    layer = writer.layers[0]
    before = layer.recurrent_states[0].clone() if layer.has_previous_state[0] else None
    sums = torch.tensor([[float(sum(tokens))] for _, _, tokens in fed])
    writer.update_conv_state(
        torch.tensor([[tokens] for _, _, tokens in fed], dtype=torch.float32), 0, conv_kernel_size=2
    )
    writer.update_recurrent_state(sums if before is None else before + sums, 0)
    keys = torch.ones(len(fed), 1, plan.width, 4)
    writer.update(keys, keys, 1)
    return [0.0] * len(fed) if before is None else before[:, 0].tolist()


def test_a_step_is_kept_if_all_its_rows_are_accepted() -> None:
    cache, (one, two) = slots(2)
    feed(cache, (one, 0, [1, 2, 3]), (two, 0, [10, 20, 30]))
    assert [cache.commit(one, 3), cache.commit(two, 3)] == [3, 3]
    feed(cache, (one, 3, [4, 5]), (two, 3, [40, 50]))
    assert cache.commit(one, 1, [1]) == 5
    assert cache.commit(two, 1) == 3  # the second row was rejected
    assert feed(cache, (one, 5, [6, 7]), (two, 3, [40, 60])) == [15.0, 60.0]


def test_padding_is_never_kept() -> None:
    cache, (one, two) = slots(2)
    plan = StepPlan([RequestPlan(np.array([1, 2]), 0, one), RequestPlan(np.array([3]), 0, two)])
    writer = cache.writer(plan)
    writer.update_recurrent_state(torch.ones(2, 1), 0)
    assert [cache.commit(one, 2), cache.commit(two, 1)] == [2, 0]


def test_requests_take_their_states_along() -> None:
    cache, (one, two, three) = slots(3)
    feed(cache, (one, 0, [1]), (two, 0, [2]), (three, 0, [3]))
    for handle in (one, two, three):
        cache.commit(handle, 1)
    cache.free(one)  # the last request moves into the gap
    assert cache.order == [three, two]
    assert feed(cache, (three, 1, [0]), (two, 1, [0])) == [3.0, 2.0]
    new, reused = cache.allocate()
    assert reused == 0
    assert feed(cache, (three, 1, [0]), (two, 1, [0]), (new, 0, [0])) == [3.0, 2.0, 0.0]


def test_what_is_exported_can_be_imported_even_after_the_memory_was_released() -> None:
    cache, (one,) = slots(1)
    feed(cache, (one, 0, [1, 2]))
    cache.commit(one, 2)
    exported = cache.export_kv(one, 0, 2).to_host()
    cache.free(one)
    cache.clear()
    cache.reserve(2, 64, most=2, keep=False)
    other, back = cache.allocate()[0], cache.allocate()[0]
    assert cache.import_kv(back, exported) == 2
    assert feed(cache, (other, 0, [0]), (back, 2, [5])) == [0.0, 3.0]
    cache.commit(back, 1)
    cache.reserve(4, 256, most=4, keep=True)
    assert feed(cache, (other, 0, [0]), (back, 3, [0])) == [0.0, 8.0]


def test_a_prompt_starts_from_an_earlier_text_if_it_begins_with_all_of_it() -> None:
    cache, (one,) = slots(1)
    feed(cache, (one, 0, [1, 2, 3]))
    cache.commit(one, 3)
    cache.free(one, [1, 2, 3])
    again, reused = cache.allocate([1, 2, 3, 4])
    assert reused == 3
    assert feed(cache, (again, 3, [4])) == [6.0]
    cache.commit(again, 1)
    cache.free(again, [1, 2, 3, 4])
    for prompt in ([1, 2, 3, 4], [1, 2, 9, 9, 9]):  # nothing left to feed; another text
        handle, reused = cache.allocate(prompt)
        assert reused == 0
        cache.free(handle)


def test_a_fork_needs_the_whole_state() -> None:
    cache, (one, two) = slots(2)
    cache.free(two)
    feed(cache, (one, 0, [1, 2]))
    cache.commit(one, 2)
    with pytest.raises(ValueError, match="last token"):
        cache.fork(one, 1)
    fork = cache.fork(one, 2)
    assert feed(cache, (one, 2, [0]), (fork, 2, [0])) == [3.0, 3.0]
