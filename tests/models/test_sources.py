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
