"""Packed linear layers: the same results, one more copy of the weights, and the model left as it was."""

from __future__ import annotations

import pytest
import torch

import lookfar
from families import tiny_model
from helpers import random_prompts, reference
from lookfar.models.binding import BoundModel
from lookfar.models.packed_linear import PackedLinears

PROMPTS = random_prompts(9, 17, 4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt"])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_the_same_logits(family: str, rows: int) -> None:
    model = tiny_model(family, torch.float32)
    ids = torch.randint(3, 90, (1, rows))
    packed = PackedLinears(model)
    assert packed.layers
    with torch.no_grad():
        plain = model(ids).logits
        with packed.in_use():
            fast = model(ids).logits
        again = model(ids).logits
    assert torch.allclose(plain, fast, atol=1e-4)
    assert torch.equal(plain, again)
    assert all("forward" not in layer.__dict__ for layer in model.modules())


def test_the_model_is_as_it_was_after_an_error() -> None:
    model = tiny_model("llama", torch.float32)
    packed = PackedLinears(model)
    with pytest.raises(ZeroDivisionError), packed.in_use():
        raise ZeroDivisionError
    assert all("forward" not in layer.__dict__ for layer in model.modules())


def test_changed_weights_are_packed_again() -> None:
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model, pack=True)
    before = lm.generate(PROMPTS[0], max_new_tokens=12).token_ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    expected = reference(model, PROMPTS[0], 12)
    assert expected != before
    assert lm.generate(PROMPTS[0], max_new_tokens=12).token_ids == expected


def test_packed_and_not_packed_decode_alike() -> None:
    model = tiny_model("llama", torch.float32)
    expected = [reference(model, prompt, 20) for prompt in PROMPTS]
    for pack in (True, False, None):
        lm = lookfar.LM(model, pack=pack)
        assert [done.token_ids for done in lm.generate(PROMPTS, max_new_tokens=20)] == expected
        assert lm.engine.runner.model.packed == (pack is not False)


def test_memory_is_stated() -> None:
    model = tiny_model("llama", torch.float32)
    linear = sum(m.weight.numel() * 4 for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert BoundModel(model, pack=True).packed_bytes == linear
    assert BoundModel(model, pack=False).packed_bytes == 0


def test_where_it_does_not_pay_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not BoundModel(tiny_model("llama", torch.float64)).packed
    assert BoundModel(tiny_model("llama", torch.float32)).packed
    monkeypatch.setattr("lookfar.models.packed_linear.SPARE", 1e15)  # as if there were hardly any memory
    assert not BoundModel(tiny_model("llama", torch.float32)).packed
