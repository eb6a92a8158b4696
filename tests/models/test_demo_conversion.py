"""Our conversion of a GGUF file equals what transformers reads from it: weights, config and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookfar.models.demo_conversion import gguf_to_safetensors

gguf = pytest.importorskip("gguf")
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)] + ["Ġ", "."]
MERGES = ["Ġ t", "h e", "Ġt he", "a n"]
TOKENS = SPECIAL + LETTERS + [merge.replace(" ", "") for merge in MERGES]


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    noise = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weight = noise.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weight)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1 if "blk" in name else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)

    add("token_embd.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    kv = HIDDEN * KV_HEADS // HEADS
    for layer in range(LAYERS):
        for part, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            add(f"blk.{layer}.{part}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_it_equals_what_transformers_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    gguf_to_safetensors(tmp_path / "tiny.gguf", tmp_path / "made")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    ours: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    expected, made = theirs.state_dict(), ours.state_dict()
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], weight) for name, weight in expected.items())
    ids = torch.tensor([[5, 9, 12, 7, 30]])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    for name in ("rope_parameters", "rms_norm_eps", "max_position_embeddings", "eos_token_id", "tie_word_embeddings"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)
    one, other = (
        AutoTokenizer.from_pretrained(tmp_path / "made"),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf"),
    )
    text = "the man. and<|im_end|> then"
    assert one(text).input_ids == other(text).input_ids
    assert one.decode(one(text).input_ids) == other.decode(other(text).input_ids)
    assert (one.bos_token, one.eos_token, one.pad_token) == (other.bos_token, other.eos_token, other.pad_token)
    assert one.chat_template == "{{ messages }}"
