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
