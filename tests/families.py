"""Tiny random models of many causal families: the smallest config of each that still has what makes it special."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

DEVICE = os.environ.get("LOOKFAR_TEST_DEVICE", "cpu")
WINDOW = 8  # prompts in the tests are longer

# Whatever of these a config knows is set; the rest of a config keeps its defaults.
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    # older names
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 48,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 256,
    "ffn_dim": 48,
    "hidden_dim": 32,
    "word_embed_proj_dim": 32,
    "ffn_hidden_size": 48,
    "rotary_dim": 4,
    "embedding_size": 32,
    "is_decoder": True,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "max_window_layers": 0,
    # chunks of recurrent layers; steps are padded to them
    "chunk_size": 8,
    "mamba_chunk_size": 8,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL_TEXT = {key: SMALL[key] for key in list(SMALL)[:8]} | TOKENS  # what every newer config knows

HEAD = {"head_dim": 8, "num_key_value_heads": 2}
COMPILED = {"head_dim": 16}  # a size that compiled steps take
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
INDEXER = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}  # many heads: no two scores are equal

# family, or family:variant → what its config needs beside SMALL
TREES: dict[str, dict[str, Any]] = {
    # hybrids whose layers are all attention
    "granitemoehybrid:attention": {
        "layer_types": ["full_attention"] * 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
    },
    "granitemoehybrid:rope": {
        "layer_types": ["full_attention"] * 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    },
    "qwen3_next:attention": {"layer_types": ["full_attention"] * 2},
    # full attention, grouped queries, rotary positions
    "llama": COMPILED,
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "diffllama": {},
    "ernie4_5": {},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": HEAD,
    "nanochat": {},
    "nemotron": HEAD,
    "olmo": {},
    "olmo2": {},
    "persimmon": {},
    "phi": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    # learned or other positions, older code
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gptj": {},
    "codegen": {},
    "opt": {},
    "biogpt": {},
    "ctrl": {},
    "bert-generation": {},
    "roberta": {},
    # ALiBi
    "bloom": {},
    "mpt": {},
    "falcon:alibi": {"alibi": True},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    # sliding windows, alone and mixed with full attention
    "mistral": COMPILED,
    "ministral": HEAD,
    "phi3": SLIDING,
    "starcoder2": SLIDING,
    "qwen2": SLIDING | COMPILED | {"max_window_layers": 1},
    "qwen3": SLIDING | COMPILED | {"max_window_layers": 1},
    "cohere2": MIXED,
    "cwm": {},
    "exaone4": MIXED,
    "gemma2": {},
    "gemma3_text": MIXED,
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    },
    "modernbert-decoder": MIXED,
    "olmo3": MIXED,
    "vaultgemma": {},
    # chunks
    "llama4_text": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    # mixtures of experts
    "mixtral": SLIDING,
    "aria_text": {},
    "ernie4_5_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "granitemoe": {},
    "hunyuan_v1_moe": HEAD,
    "jetmoe": {},
    "minimax_m2": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": SLIDING,
    # latent attention
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "longcat_flash": LATENT,
    "minicpm3": LATENT,
    # sparse indexers, which choose fewer keys than the prompts have
    "deepseek_v32": LATENT | INDEXER,
    "glm_moe_dsa": LATENT | INDEXER,
    "axk2": LATENT | INDEXER,
    "hy_v4": LATENT | INDEXER,
    # attention sinks
    "gpt_oss": {},
    "mimo_v2_flash": {},
}
# Families with attention code of their own, or with a bias by position: they cannot be run in flat steps.
NOT_FLAT = {
    "deepseek_v32",
    "glm_moe_dsa",
    "axk2",
    "hy_v4",
    "gpt_neox_japanese",
    "gptj",
    "codegen",
    "bloom",
    "mpt",
    "falcon:alibi",
    "falcon",
}

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8, "mamba_d_ssm": 64}
SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
# Recurrent and hybrid models: chains, with state that is put back and tokens that are fed again.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "state_size": 8},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA,
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "full_attention"], "shared_intermediate_size": 48},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8},
    "qwen3_next": HYBRID | DELTA,
    "qwen3_5_text": HYBRID | DELTA,
    "qwen3_5_moe_text": HYBRID | DELTA,
    "olmo_hybrid": HYBRID | DELTA,
    "kimi_linear": HYBRID | LATENT | {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2},
    "bailing_hybrid": HYBRID | LATENT,
    "lfm2": SHORT_CONV,
    "lfm2_moe": SHORT_CONV | {"num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": WINDOW,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "rel_extent": 16,
        "d_rel": 4,
    },
}
# Attention only, but without masks or positions of our own: chains, one request in a forward pass.
CHAINS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "roformer": {},
    "trocr": {},
}
FALLBACK: dict[str, dict[str, Any]] = {
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "minimax": HYBRID,
    "doge": {"keep_window_size": WINDOW},
    "rwkv": {},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "moshi": {},
    "openai-gpt": {},
}


def tiny_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """The random model of a family."""
    family = name.partition(":")[0]
    config_class = CONFIG_MAPPING[family]
    known = config_class()
    settings = {key: value for key, value in SMALL.items() if getattr(known, key, None) is not None}
    if family == "falcon":
        del settings["head_dim"]  # derived there
    attention = changes.pop("attention", None)
    settings |= TOKENS | (TREES | RECURRENT | CHAINS | FALLBACK).get(name, {}) | changes
    return random_model(config_class(**settings), dtype, attention)


def random_model(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float64, attention: str | None = None
) -> PreTrainedModel:
    """A random model of a config, the same one every time. It never emits a stop token by itself."""
    torch.manual_seed(0)
    return randomise(AutoModelForCausalLM.from_config(config, attn_implementation=attention), dtype)


def randomise(model: PreTrainedModel, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Give a new model random weights that make it depend on its whole text."""
    model = model.to(DEVICE, dtype).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the faster ones know no float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough that the next token depends on the whole text
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return model
