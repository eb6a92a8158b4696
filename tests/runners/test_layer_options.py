"""Fused and compiled layers give the same results and leave the model as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from families import DEVICE, tiny_model
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.errors import ConfigError
from lookfar.kernels import gemv as gemv_module
from lookfar.kernels.attention_op import NAME
from lookfar.kernels.linear_op import MIN_INPUTS
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import agree, branched_plan, one_slot
from lookfar.runners.cuda_graph.compiled_layers import CompiledLayers
from lookfar.runners.cuda_graph.flat_step import FlatStep
from lookfar.runners.cuda_graph.fused_linear import FusedLinears

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
        fused = FusedLinears(model, lambda: model(IDS))
        assert [len(group.layers) for group in fused.groups] == sizes
        kinds = [type(layer) for layer in model.modules()]
        called = []
        hook = torch.nn.functional.linear
        with fused.in_use():
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
    assert not any("shared" in vars(layer) for layer in model.modules())


def test_weights_that_others_use_too_stay_where_they_are() -> None:
    model = tiny_model("llama", torch.float32)
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = attention.v_proj.weight
    fused = FusedLinears(model, lambda: model(IDS))
    assert [len(group.layers) for group in fused.groups] == [2, 3, 2]


@pytest.mark.slow
def test_one_compiled_layer_serves_for_all_and_for_all_numbers_of_rows() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model("llama", torch.float32, num_hidden_layers=5, head_dim=8)  # no size that rows have, too
    bound, compiled = BoundModel(model, pack=False), CompiledLayers(model, backend="aot_eager")
    fused = FusedLinears(model, lambda: model(IDS))
    cache = one_slot(64)
    for rows in (16, 32, 64, 1, 2, 8, 32):
        step = FlatStep(bound, cache, rows, 1)
        step.fill(branched_plan(bound.vocab_size) if rows >= 16 else StepPlan([RequestPlan(np.array([5]), 14)]))
        step.device.copy_(step.host)
        compiled.select_layer = step.writer.select_layer
        with bound.attending(NAME):
            expected = step.forward(model.forward)
            with fused.in_use():
                found = step.forward(compiled)
        assert agree(found[:1], expected[:1])
    assert counters["stats"]["unique_graphs"] == 2  # one row, and more
    assert not counters["graph_break"]
    assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.gpu
def test_large_layers_have_a_kernel_of_their_own_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.bfloat16, hidden_size=MIN_INPUTS, intermediate_size=2 * MIN_INPUTS)
    bound, fused = BoundModel(model, pack=False), FusedLinears(model, lambda: model(IDS))
    called: list[tuple[int, ...]] = []
    gemv = gemv_module.gemv
    monkeypatch.setattr(gemv_module, "gemv", lambda *given: called.append(given[1].shape) or gemv(*given))
    for rows in (1, 2):
        step = FlatStep(bound, one_slot(64), rows, 1)
        step.fill(StepPlan([RequestPlan(np.array([5]), 0)]))
        step.device.copy_(step.host)
        called.clear()
        with bound.attending(NAME):
            expected = step.forward(model.forward)
            with fused.in_use():
                found = step.forward(model.forward)
        assert (found[0] - expected[0]).float().norm() < 0.02 * expected[0].float().norm()
        assert bool(called) == (rows == 1)


def test_a_model_without_repeated_layers_is_not_compiled() -> None:
    model = tiny_model("llama", torch.float32)
    model._no_split_modules = []
    with pytest.raises(ConfigError, match="finds no repeated layers in LlamaForCausalLM"):
        CompiledLayers(model)
