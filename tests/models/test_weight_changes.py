"""A model that changes between two calls: the next call decodes what the model is then."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import PreTrainedModel

import lookfar
from families import DEVICE, tiny_model
from helpers import flat_lm, random_prompts, reference
from lookfar import LM
from lookfar.errors import ModelError
from lookfar.models.packed_linear import PackedLinears
from lookfar.models.weight_changes import WeightState

PROMPTS = random_prompts(12, 30, 5)
NEW = 12


def noise_like(tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)


def add_through_data(model: PreTrainedModel) -> None:
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.add_(noise_like(parameter, seed))


def one_row(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[7:60] *= -3.0


def one_column(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[:, 3] = 9.0


def new_tensors_in_rounds(model: PreTrainedModel) -> None:
    for number in range(3):
        for seed, parameter in enumerate(model.parameters()):
            parameter.data = (parameter.data + noise_like(parameter, seed + number)).clone()


def swapped_layers(model: PreTrainedModel) -> None:
    first, last = model.model.layers[0].mlp, model.model.layers[-1].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        one, other = getattr(first, name).weight, getattr(last, name).weight
        one.data, other.data = other.data, one.data


def one_optimiser_step(model: PreTrainedModel) -> None:
    for seed, parameter in enumerate(model.parameters()):
        parameter.grad = noise_like(parameter, seed)
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).step()
    model.zero_grad()


def assigned_state(model: PreTrainedModel) -> None:
    state = {name: value + noise_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def half_and_back(model: PreTrainedModel) -> None:
    add_through_data(model.half().float())


def merged_adapter(model: PreTrainedModel) -> None:
    """Merge as peft does: `base_layer.weight.data += delta`."""
    for seed, layer in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
        a, b = noise_like(torch.ones(2, layer.in_features), seed), noise_like(torch.ones(layer.out_features, 2), seed)
        layer.weight.data += (20 * b @ a).to(layer.weight)


def pruned(model: PreTrainedModel) -> None:
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        prune.random_unstructured(layer, "weight", amount=0.5)


def parametrised(model: PreTrainedModel) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    for layer in model.model.layers:
        nn.utils.parametrize.register_parametrization(layer.mlp.down_proj, "weight", Doubled())


def grown_vocabulary(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 37)
    add_through_data(model)


def shrunk_vocabulary(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(model.config.vocab_size - 5)


CHANGES = [
    add_through_data,
    one_row,
    one_column,
    new_tensors_in_rounds,
    swapped_layers,
    one_optimiser_step,
    assigned_state,
    half_and_back,
    merged_adapter,
    pruned,
    parametrised,
    grown_vocabulary,
    shrunk_vocabulary,
]


def decode_and_compare(lm: LM, model: PreTrainedModel) -> list[list[int]]:
    """Decode alone and in a batch; the tokens, which are those of transformers."""
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    assert [lm.generate(prompt, max_new_tokens=NEW).token_ids for prompt in PROMPTS] == expected
    assert [done.token_ids for done in lm.generate(PROMPTS, max_new_tokens=NEW)] == expected
    return expected


KINDS = {
    "packed": lambda model: LM(model, pack=True),
    "flat": flat_lm,  # on a GPU: captured
    "compiled": lambda model: LM(model, compile=True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize("kind", ["packed", "flat", pytest.param("compiled", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second has biases
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_changed_model_decodes_what_it_is_now(
    change: Callable[[PreTrainedModel], None], family: str, kind: str
) -> None:
    model = tiny_model(family, torch.float32)
    lm = KINDS[kind](model)
    before = decode_and_compare(lm, model)
    change(model)
    after = decode_and_compare(lm, model)
    assert after != before or change is shrunk_vocabulary, "the change shows nothing"
    if change not in (pruned, parametrised, shrunk_vocabulary):
        change(model)
        decode_and_compare(lm, model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "flat"])
@pytest.mark.parametrize("convert", [torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.filterwarnings("ignore::lookfar.errors.LookfarWarning")  # on a GPU, float64 runs without graphs
def test_another_precision_after_the_first_use(convert: torch.dtype, kind: str) -> None:
    model = tiny_model("llama", torch.float32)
    lm = KINDS[kind](model)
    decode_and_compare(lm, model)
    model.to(convert)
    expected = reference(model, PROMPTS[0], NEW)
    found = lm.generate(PROMPTS[0], max_new_tokens=NEW, strategy="none").token_ids
    assert found == expected if kind == "packed" or convert == torch.float64 else len(found) == len(expected)
    model.float()
    decode_and_compare(lm, model)


def test_an_accelerated_model_follows_changes() -> None:
    model = tiny_model("llama", torch.float32)
    lookfar.accelerate(model, pack=True)
    ids = torch.tensor([PROMPTS[0]], device=DEVICE)
    for _ in range(2):
        fresh = copy.deepcopy(model)
        assert model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, 12:].tolist() == reference(
            lookfar.restore(fresh), PROMPTS[0], NEW
        )
        add_through_data(model)


def test_inference_mode_at_the_first_call_or_when_the_model_is_made() -> None:
    model = tiny_model("llama", torch.float32)
    lm = LM(model, pack=True)
    with torch.inference_mode():
        first = lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
        born = copy.deepcopy(model)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == first == reference(model, PROMPTS[0], NEW)
    assert LM(born, pack=True).generate(PROMPTS[0], max_new_tokens=NEW).token_ids == first


def test_another_attention_between_two_calls() -> None:
    model = tiny_model("llama", torch.float64)
    lm = LM(model)
    decode_and_compare(lm, model)
    model.set_attn_implementation("eager")
    decode_and_compare(lm, model)


@pytest.mark.slow
def test_a_head_that_is_wider_than_the_embeddings() -> None:
    model = tiny_model("llama", torch.float32)
    rows = model.lm_head.out_features
    wider = nn.Linear(model.lm_head.in_features, rows + 20, bias=True, device=DEVICE)
    with torch.no_grad():
        wider.weight[:rows] = model.lm_head.weight
        wider.bias[:rows], wider.bias[rows:] = 0.0, -0.5  # never chosen, but often predicted
        wider.weight[rows:] = 0.0
    model.lm_head = wider
    lm = LM(model)
    for temperature in (None, 1.3):
        for seed, prompt in enumerate(PROMPTS):
            options = (
                {}
                if temperature is None
                else {"temperature": temperature, "seed": seed, "bad_words_ids": [[i] for i in range(rows, rows + 20)]}
            )
            expected = lm.generate(prompt, max_new_tokens=40, strategy="none", **options).token_ids
            assert lm.generate(prompt, max_new_tokens=40, budget=16, **options).token_ids == expected


def test_copies_of_weights_that_are_gone_are_dropped() -> None:
    model = tiny_model("mixtral", torch.float32)
    lm = LM(model, pack=True)
    for _ in range(3):
        lm.generate(PROMPTS[0], max_new_tokens=3)
        packed = lm.engine.runner.model._packed
        assert isinstance(packed, PackedLinears)
        assert len(packed._packed) == len({id(layer.weight) for layer in packed.layers})
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(layer.weight.detach().clone())


def test_a_sample_covers_every_row_and_column() -> None:
    for shape in ((5, 9), (9, 5), (7, 7), (1, 4)):
        weight = torch.randn(shape)
        state = WeightState.of(weight)
        assert state == WeightState.of(weight)
        for at in [(row, slice(None)) for row in range(shape[0])] + [
            (slice(None), column) for column in range(shape[1])
        ]:
            kept = weight.clone()
            weight.data[at] += 1.0
            assert WeightState.of(weight) != state
            weight.data.copy_(kept)
            assert WeightState.of(weight).sample == state.sample


@pytest.mark.skipif(DEVICE != "cpu", reason="about packed weights")
def test_single_values_need_a_refresh() -> None:
    model = tiny_model("llama", torch.float32)
    lm = LM(model, pack=True)
    lookfar.accelerate(model, pack=True)
    ids = torch.tensor([PROMPTS[0]])
    model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    lm.generate(PROMPTS[0], max_new_tokens=NEW)
    weight = model.lm_head.weight
    state = WeightState.of(weight)
    for row in range(weight.shape[0]):
        weight.data[row, (row + 1) % weight.shape[1]] += 8.0 * (row % 3)  # next to every sampled value
    assert WeightState.of(weight) == state
    lm.refresh()
    lookfar.refresh(model)
    fresh = lookfar.restore(copy.deepcopy(model))
    expected = reference(fresh, PROMPTS[0], NEW)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == expected
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert out[0, 12:].tolist() == expected
    lookfar.refresh(fresh)  # nothing is kept of it


@pytest.mark.parametrize("change", [add_through_data, assigned_state], ids=lambda change: change.__name__)
def test_kv_of_the_model_of_before_is_not_used_again(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model("llama", torch.float32)
    lm = LM(model, pack=DEVICE == "cpu")
    first = lm.generate(PROMPTS[1], max_new_tokens=NEW, reuse=True)
    text = PROMPTS[1] + first.token_ids + [5, 6]
    again = lm.generate(text, max_new_tokens=3, reuse=True)
    assert again.stats.reused_tokens > len(PROMPTS[1])
    change(model)
    if DEVICE != "cpu" and change is add_through_data:
        lm.refresh()  # without packed copies, changes through `.data` are not seen
    done = lm.generate(text, max_new_tokens=NEW, reuse=True)
    assert done.token_ids == reference(model, text, NEW)
    assert done.stats.reused_tokens == 0


@pytest.mark.filterwarnings("ignore::lookfar.errors.LookfarWarning")  # on a GPU, float64 runs without graphs
def test_a_refresh_in_the_middle_of_requests() -> None:
    model = tiny_model("llama", torch.float32)
    lm = LM(model)
    with lm.stream(PROMPTS[0], max_new_tokens=40) as stream:
        next(iter(stream))
        lm.refresh()
        assert sum(len(chunk.token_ids) for chunk in stream) > 20
    with lm.stream(PROMPTS[0], max_new_tokens=200) as stream:
        next(iter(stream))
        lm.driver.call(lambda: (model.double(), lm.engine.refresh(everything=True)))  # between two steps
        with pytest.raises(ModelError, match="changed while this request was running: send it again"):
            list(stream)
    decode_and_compare(lm, model)
