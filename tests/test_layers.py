"""What is done to a model's layers for a GPU leaves its answers alone, and the model as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from families import DEVICE, tiny_model
from lookfar.cache import SlotCache
from lookfar.errors import ConfigError
from lookfar.gpu import reading
from lookfar.gpu.compiled import CompiledLayers
from lookfar.gpu.interface import NAME
from lookfar.gpu.one_row import LONG
from lookfar.gpu.packed import PackedStep
from lookfar.gpu.sisters import Sisters
from lookfar.model import BoundModel
from lookfar.probe import agree, branched_plan
from lookfar.tree import Plan, SequencePlan

IDS = torch.arange(1, 9, device=DEVICE)[None]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", [3, 2, 3, 2]),  # queries, keys, values; gate, up
        ("qwen2", [3, 2, 3, 2]),  # with biases
        ("phi3", []),  # already one layer each
        ("gpt_neox", []),
        ("phi", [3, 3]),  # its two layers behind the same norm are not called one after the other
    ],
)
def test_layers_that_read_the_same_multiply_at_once(family: str, sizes: list[int]) -> None:
    model = tiny_model(family, torch.float32)
    with torch.no_grad():
        expected = model(IDS).logits
        sisters = Sisters(model, lambda: model(IDS))
        assert [len(group.layers) for group in sisters.groups] == sizes
        kinds = [type(layer) for layer in model.modules()]
        called = []
        hook = torch.nn.functional.linear
        with sisters.in_use():
            torch.nn.functional.linear = lambda *a: called.append(1) or hook(*a)  # type: ignore[assignment,func-returns-value]
            try:
                found = model(IDS).logits
            finally:
                torch.nn.functional.linear = hook
        if sizes:
            assert len(called) == sum(type(m) is torch.nn.Linear for m in model.modules()) - sum(sizes) + len(sizes)
        assert torch.allclose(found, expected, atol=1e-4)
        assert torch.equal(model(IDS).logits, expected)  # the model itself is as it was
    assert [type(layer) for layer in model.modules()] == kinds
    assert not any("box" in vars(layer) for layer in model.modules())


def test_weights_that_others_use_too_stay_where_they_are() -> None:
    model = tiny_model("llama", torch.float32)
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = attention.v_proj.weight
    sisters = Sisters(model, lambda: model(IDS))
    assert [len(group.layers) for group in sisters.groups] == [2, 3, 2]


def test_one_compiled_layer_serves_for_all_and_for_all_numbers_of_rows() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model("llama", torch.float32, num_hidden_layers=5)
    bound, compiled = BoundModel(model, pack=False), CompiledLayers(model, backend="aot_eager")
    sisters = Sisters(model, lambda: model(IDS))
    cache = SlotCache(1, 64)
    for rows in (16, 32, 64, 1, 2, 8, 32):
        step = PackedStep(bound, cache, rows, 1)
        step.fill(branched_plan(bound.vocab_size) if rows >= 16 else Plan([SequencePlan(np.array([5]), 14)]))
        step.device.copy_(step.host)
        compiled.turn = step.packed.turn_of
        with bound.attending(NAME):
            expected = step.forward(model.forward)
            with sisters.in_use():
                found = step.forward(compiled)
        assert agree(found[:1], expected[:1])
    assert counters["stats"]["unique_graphs"] == 2  # one row, and more
    assert not counters["graph_break"]
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_large_layers_have_a_kernel_of_their_own_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.bfloat16, hidden_size=LONG, intermediate_size=2 * LONG)
    bound, sisters = BoundModel(model, pack=False), Sisters(model, lambda: model(IDS))
    called: list[tuple[int, ...]] = []
    multiply = reading.multiply
    monkeypatch.setattr(reading, "multiply", lambda *given: called.append(given[1].shape) or multiply(*given))
    for rows in (1, 2):
        step = PackedStep(bound, SlotCache(1, 64), rows, 1)
        step.fill(Plan([SequencePlan(np.array([5]), 0)]))
        step.device.copy_(step.host)
        called.clear()
        with bound.attending(NAME):
            expected = step.forward(model.forward)
            with sisters.in_use():
                found = step.forward(model.forward)
        assert (found[0] - expected[0]).float().norm() < 0.02 * expected[0].float().norm()
        assert bool(called) == (rows == 1)


def test_a_model_without_repeated_layers_is_not_compiled() -> None:
    model = tiny_model("llama", torch.float32)
    model._no_split_modules = []
    with pytest.raises(ConfigError, match="finds no repeated layers in LlamaForCausalLM"):
        CompiledLayers(model)
