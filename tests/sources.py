"""Tiny random models of encoder-decoder families, and sources for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, PreTrainedModel

from families import DEVICE, TOKENS, randomise
from helpers import random_prompts

Tensors = dict[str, torch.Tensor]

# Whatever of these a config knows is set.
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "hidden_size": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "num_mel_bins": 8,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
    "decoder_vocab_size": 96,
    "relative_attention_max_distance": 16,  # texts are longer
    "relative_attention_num_buckets": 8,
}
TREE_FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5:gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {},
    "umt5": {},
    "bart": {},
    "mbart": {"forced_bos_token_id": 7},
    "plbart": {},
    "marian": {},
    "pegasus": {},
    "blenderbot": {},
    "blenderbot-small": {},
    "m2m_100": {"forced_bos_token_id": 7},
    "whisper": {"suppress_tokens": [], "begin_suppress_tokens": None},
}
CHAIN_FAMILIES: dict[str, dict[str, Any]] = {
    "led": {"attention_window": 4},
    "longt5": {"local_radius": 3},
    "mvp": {},
    "pegasus_x": {},
}
FALLBACK: dict[str, dict[str, Any]] = {
    "switch_transformers": {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}
AUDIO = {"whisper"}


def source_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """The random model of a family."""
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[name.partition(":")[0]]
    known = config_class()
    settings = {key: value for key, value in SMALL.items() if getattr(known, key, None) is not None}
    settings |= {**TOKENS, "decoder_start_token_id": 2, **TREE_FAMILIES.get(name, {}), **CHAIN_FAMILIES.get(name, {})}
    settings |= FALLBACK.get(name, {})
    config = config_class(**settings | changes)
    auto = AutoModelForSpeechSeq2Seq if name in AUDIO else AutoModelForSeq2SeqLM
    return randomise(auto.from_config(config), dtype)


def sources(name: str, lengths: list[int], dtype: torch.dtype = torch.float64) -> Tensors:
    """A right-padded batch of sources."""
    if name in AUDIO:
        torch.manual_seed(1)
        return {"input_features": torch.randn(len(lengths), 8, 32, dtype=dtype, device=DEVICE)}
    rows = random_prompts(*lengths)
    ids = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=DEVICE)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}
