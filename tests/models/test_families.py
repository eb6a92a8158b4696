"""Any model, unpatched: every family gives the tokens of its own `generate`, alone and in a ragged batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

import lookfar
from families import DEVICE, FALLBACK, NOT_FLAT, SMALL_TEXT, TREES, WINDOW, random_model, tiny_model
from helpers import oracle, random_prompts, reference
from lookfar.drafters.jacobi import Jacobi
from lookfar.drafters.lookahead import Lookahead
from lookfar.engine.engine import Engine, EngineConfig
from lookfar.engine.request import Request
from lookfar.models.binding import BoundModel
from lookfar.models.support import examine
from lookfar.runners.eager import EagerRunner
from lookfar.testing import run_requests

PROMPTS = random_prompts(3 * WINDOW, 4 * WINDOW + 1, 5)  # two of them longer than any window
NEW = 20


@pytest.mark.slow
@pytest.mark.parametrize("family", TREES)
def test_tree_families_give_their_own_tokens(family: str) -> None:
    model = tiny_model(family)
    lm = lookfar.LM(model, prefill_chunk=16)
    assert lm.engine.runner.model.support.trees
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    right = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    for strategy in ("none", Jacobi(block=4), Lookahead(window=4, ngram=4, guesses=4), "auto", right):
        budget = 12 if strategy == "auto" else None
        single = [lm.generate(prompt, max_new_tokens=NEW, strategy=strategy, budget=budget) for prompt in PROMPTS]
        batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=strategy, budget=budget)
        assert [done.token_ids for done in single] == expected, strategy
        assert [done.token_ids for done in batch] == expected, strategy
    # The last strategy knew the text, so this compared trees and not decoding without speculation with itself.
    assert all(done.stats.tokens_per_step > 1.8 for done in batch)
    if DEVICE == "cpu":
        assert lm.engine.runner.limits.padded == (family in NOT_FLAT)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "llama4_text", "gpt_oss", "deepseek_v3", "mixtral"])
def test_padded_steps_give_the_same_tokens(family: str) -> None:
    """What families that cannot be run in flat steps get, here with all kinds of layers."""
    model = tiny_model(family)
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    right = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    engine = Engine(EagerRunner(BoundModel(model)), EngineConfig(prefill_chunk=16))
    for strategies in ((), (Lookahead(window=4, ngram=4, guesses=4),), (right,)):
        requests = [Request(prompt, NEW, strategies=strategies) for prompt in PROMPTS]
        assert [done.token_ids for done in run_requests(engine, requests)] == expected, strategies
    assert engine.runner.limits.padded


@pytest.mark.slow
@pytest.mark.parametrize("family", FALLBACK)
def test_other_families_use_the_fallback_with_one_warning(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32)
    lm = lookfar.LM(model)
    assert not lm.engine.runner.model.support.trees
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    with pytest.warns(UserWarning, match="decodes without speculation: it"):
        done = lm.generate(PROMPTS, max_new_tokens=NEW)
    lm.generate(PROMPTS[0], max_new_tokens=2)  # a second warning would be an error
    assert [one.token_ids for one in done] == expected
    assert done[0].stats.tokens_per_step == 1.0


def test_the_required_families_are_there() -> None:
    required = """llama mistral mixtral gemma2 gemma3_text qwen2 qwen3 qwen3_moe phi3 gpt2 gpt_neox opt bloom mpt
        falcon starcoder2 olmo2 cohere2 deepseek_v3 gpt_oss"""
    assert set(required.split()) <= set(TREES)
    assert len(TREES) >= 50


def newest() -> dict[str, PreTrainedConfig]:
    """Configs that do not fit the common mould: a text model inside a multimodal one, layers of different shapes."""
    text: dict[str, Any] = SMALL_TEXT | {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    images = {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    shapes = {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96}
    return {
        "gemma3": CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision, **images),
        "gemma4_text": CONFIG_MAPPING["gemma4_text"](**text, **shapes),
    }


@pytest.mark.parametrize("family", ["gemma3", "gemma4_text"])
def test_families_that_do_not_fit_the_mould(family: str) -> None:
    model = random_model(newest()[family])
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    right = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    lm = lookfar.LM(model)
    for strategy in ("none", "lookahead", right):
        batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=strategy)
        assert [done.token_ids for done in batch] == expected
    assert all(done.stats.tokens_per_step > 1.8 for done in batch)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "gpt2", "mistral", "falcon:alibi"])
def test_eager_attention(family: str) -> None:
    model = tiny_model(family, attention="eager")
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    right = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    done = lookfar.LM(model).generate(PROMPTS, max_new_tokens=NEW, strategy=right)
    assert [one.token_ids for one in done] == expected


def test_attention_that_takes_no_mask_is_replaced_for_the_step_only() -> None:
    model = tiny_model("llama")
    expected = reference(model, PROMPTS[0], NEW)
    model.config._attn_implementation = "flex_attention"
    lm = lookfar.LM(model)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == expected
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}])
def test_rotary_scaling_that_follows_the_length_limits_trees(rope: dict[str, object]) -> None:
    rope = rope | {"rope_theta": 10000.0}
    model = tiny_model("llama", max_position_embeddings=64, rope_parameters=rope)
    lm = lookfar.LM(model)
    small = Lookahead(window=2, ngram=3, guesses=2)
    assert lm.engine.runner.model.support.tree_limit == 64
    short, long = PROMPTS[0], random_prompts(50)[0]
    done = lm.generate(short, max_new_tokens=NEW, strategy=small)
    assert done.token_ids == reference(model, short, NEW)
    assert done.stats.drafters
    with pytest.warns(UserWarning, match="rotary scaling"):
        done = lm.generate(long, max_new_tokens=12, strategy=small)
    assert done.token_ids == reference(model, long, 12)


def test_phi3_long_rope() -> None:
    factors = [1.0, 2.0, 3.0, 4.0]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": factors}
    changes = {
        "original_max_position_embeddings": 48,
        "rope_parameters": rope | {"original_max_position_embeddings": 48},
    }
    model = tiny_model("phi3", **changes)
    lm = lookfar.LM(model)
    small = Lookahead(window=2, ngram=3, guesses=2)
    across = random_prompts(40)[0]
    with pytest.warns(UserWarning, match="rotary scaling"):
        assert lm.generate(across, max_new_tokens=16, strategy=small).token_ids == reference(model, across, 16)


def test_a_family_that_transformers_has_but_is_no_causal_model_is_refused() -> None:
    from transformers import ViTConfig

    with pytest.raises(lookfar.LookfarError, match="no language model"):
        examine(ViTConfig())


@pytest.mark.parametrize(
    ("quantized", "trees"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0}, True),
    ],
)
def test_quantized_layers_that_mix_rows_take_no_drafts(quantized: dict[str, Any], trees: bool) -> None:
    from transformers import LlamaConfig

    support = examine(LlamaConfig(quantization_config=quantized))
    assert support.trees is trees
    assert trees or "8-bit" in support.reason


def test_costs_are_measured_where_a_model_counts_cached_tokens_itself(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("lookfar.engine.costs.cache_dir", lambda: tmp_path)
    model = tiny_model("xglm", torch.float32)
    prompt = random_prompts(12)[0]
    assert lookfar.LM(model).generate(prompt, max_new_tokens=6).token_ids == reference(model, prompt, 6)
    assert (tmp_path / "costs.json").exists()
