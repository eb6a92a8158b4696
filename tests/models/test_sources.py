"""Encoder-decoder models: every family gives the tokens of its own `generate`, alone and in a ragged batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookfar
from helpers import partly_right, random_state
from lookfar.drafters.base import Strategy
from sources import AUDIO, CHAIN_FAMILIES, TREE_FAMILIES, Tensors, source_model, sources

NEW = 16


def generate(model: PreTrainedModel, inputs: Tensors, **options: Any) -> list[list[int]]:
    """The decoded tokens of all rows, the first one included."""
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "pad_token_id": 0, **options}
    out: list[list[int]] = model.generate(**inputs, **options).tolist()
    return out


def drafts_for(inputs: Tensors, expected: list[list[int]]) -> Strategy:
    """Drafts for texts that begin with the source, where it is a text."""
    texts = expected
    if "input_ids" in inputs:
        given = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        source = [ids[mask.bool()].tolist() for ids, mask in given]
        texts = [read + decoded for read, decoded in zip(source, expected, strict=True)]
    else:  # Whisper returns what follows the first token
        texts = [[2, *decoded] for decoded in expected]
    return partly_right(texts)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*TREE_FAMILIES, *CHAIN_FAMILIES])
def test_families_give_their_own_tokens(family: str) -> None:
    model = source_model(family)
    support = lookfar.LM(model).engine.runner.model.support
    assert support.mode == ("tree" if family in TREE_FAMILIES else "chain")
    for lengths in ([9], [5, 21, 12]):
        inputs = sources(family, lengths)
        for sampling in ({}, {"do_sample": True, "temperature": 0.8, "top_k": 30}):
            expected, after = generate(model, inputs, **sampling), random_state()
            for strategy in (drafts_for(inputs, expected), "auto"):
                given = {"custom_generate": lookfar.generate, "strategy": strategy, "budget": 12}
                assert generate(model, inputs, **sampling, **given) == expected, (lengths, sampling, strategy)
                assert torch.equal(random_state(), after)
                if strategy != "auto":
                    assert lookfar.last_stats(model).tokens_per_step > 1.3


def test_experts_with_limits_use_the_fallback() -> None:
    model = source_model("switch_transformers", dtype=torch.float32)
    inputs = sources("switch_transformers", [7])
    expected = generate(model, inputs)
    with pytest.warns(UserWarning, match="its experts take a limited number"):
        assert generate(model, inputs, custom_generate=lookfar.generate) == expected


def test_the_required_families_are_there() -> None:
    assert {"t5", "bart", "mbart", "marian", "pegasus", "m2m_100", "whisper"} <= set(TREE_FAMILIES)
    assert set(TREE_FAMILIES) >= AUDIO


@pytest.mark.parametrize("family", ["t5", "bart", "led"])
@pytest.mark.parametrize("lengths", [[9], [5, 21, 12]])
def test_scores_and_caches_are_returned(family: str, lengths: list[int]) -> None:
    model, inputs = source_model(family), sources(family, lengths)
    stop = generate(model, inputs)[0][5]  # the first text ends early, and the others go on
    options = {"eos_token_id": stop, "max_new_tokens": 10, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    own = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, custom_generate=lookfar.generate, strategy="suffix")
    assert torch.equal(ours.sequences, own.sequences)
    assert type(ours) is type(own)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(ours, name), getattr(own, name))
    for part in ("self_attention_cache", "cross_attention_cache"):
        found, expected = getattr(ours.past_key_values, part), getattr(own.past_key_values, part)
        for layer, other in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys)
            torch.testing.assert_close(layer.values, other.values)
