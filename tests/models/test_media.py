"""Prompts with images and audio: every family gives the tokens of its own `generate`, alone and in a ragged batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookfar
from helpers import partly_right, random_state
from lookfar.drafters.base import Strategy
from media import MEDIA, Tensors, media_model, media_prompts

NEW = 16


def generate(model: PreTrainedModel, inputs: Tensors, **options: Any) -> list[list[int]]:
    """The new tokens of all rows."""
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    out = model.generate(**inputs, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def drafts_for(inputs: Tensors, expected: list[list[int]]) -> Strategy:
    rows = zip(inputs["input_ids"], inputs["attention_mask"], expected, strict=True)
    return partly_right([ids[mask.bool()].tolist() + new for ids, mask, new in rows])


def test_the_required_families_are_there() -> None:
    required = """gemma3 gemma4 qwen2_vl qwen2_5_vl qwen3_vl llava llava_next mistral3 internvl glm4v idefics3 smolvlm
        paligemma voxtral qwen2_audio"""
    assert set(required.split()) <= set(MEDIA)


@pytest.mark.slow
@pytest.mark.parametrize("family", MEDIA)
def test_families_give_their_own_tokens(family: str) -> None:
    model = media_model(family)
    # one image, two in one prompt, mere text, and a ragged batch of all of them
    several = [1, 1] if MEDIA[family].alone else [1, 0, 2]
    prompts = [media_prompts(family, images) for images in ([1], [2], [0], several)]
    if MEDIA[family].alone:
        del prompts[1]
    for inputs in prompts:
        for sampling in ({}, {"do_sample": True, "temperature": 0.8, "top_k": 30}):
            expected, after = generate(model, inputs, **sampling), random_state()
            for strategy in (drafts_for(inputs, expected), "auto"):
                given = {"custom_generate": lookfar.generate, "strategy": strategy, "budget": 12}
                assert generate(model, inputs, **sampling, **given) == expected, (len(expected), sampling, strategy)
                assert torch.equal(random_state(), after)
                if strategy != "auto":
                    assert lookfar.last_stats(model).tokens_per_step > 1.3


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "paligemma", "qwen3_5"])
@pytest.mark.parametrize("num_images", [[1], [1, 0, 2]])
def test_scores_and_caches_are_returned(family: str, num_images: list[int]) -> None:
    model, inputs = media_model(family), media_prompts(family, num_images)
    stop = generate(model, inputs)[0][4]  # the first prompt ends early, and the others go on
    options = {"eos_token_id": stop, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    own = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, custom_generate=lookfar.generate, strategy="suffix")
    assert torch.equal(ours.sequences, own.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(ours, name), getattr(own, name))
    for layer, expected in zip(ours.past_key_values.layers, own.past_key_values.layers, strict=True):
        if getattr(expected, "keys", None) is not None:
            torch.testing.assert_close(layer.keys[0, :, -5:], expected.keys[0, :, -5:], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.values[0, :, -5:], expected.values[0, :, -5:], rtol=1e-4, atol=1e-5)
