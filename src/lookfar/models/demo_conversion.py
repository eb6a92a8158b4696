"""The demo model's GGUF file → a transformers directory: config, tokenizer and float32 weights.

transformers can read GGUF files too. It parses the 150,000 entries of this one's metadata several times and makes two
models of its weights, which took 20 seconds of a newcomer's first minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from lookfar.core.arrays import Floats
from lookfar.core.progress import progress_bar

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3  # the type of a special token


def gguf_to_safetensors(source: Path, made: Path) -> None:
    """Write a directory that `from_pretrained` loads."""
    from gguf import GGUFReader, dequantize

    with progress_bar("Reading the demo model"):
        reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = llama_config(facts)
    made.mkdir()
    config.save_pretrained(made)
    GenerationConfig.from_model_config(config).save_pretrained(made)
    tokenizer(facts).save_pretrained(made)
    weights = {}
    with progress_bar("Converting the demo model", len(reader.tensors)) as advance:
        for tensor in reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
                weight = halves_apart(weight, config.head_dim)
            weights[weight_name(tensor.name)] = np.ascontiguousarray(weight)
            advance(1)
    save_file(weights, made / "model.safetensors", {"format": "pt"})


def llama_config(facts: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        head_dim=facts["llama.rope.dimension_count"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
    )


def tokenizer(facts: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the byte-level BPE tokenizer, as transformers makes it of such a file."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    bpe = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)}, merges, continuing_subword_prefix="", end_of_word_suffix=""
        )
    )
    bpe.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == SPECIAL
        ]
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    named = {
        f"{role}_token": tokens[facts[f"tokenizer.ggml.{name}_token_id"]]
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=facts["tokenizer.chat_template"], **named)


def weight_name(name: str) -> str:
    """Return transformers' name of a weight."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_PARTS[part]}.weight"


def halves_apart(weight: Floats, head_dim: int) -> Floats:
    """Order the rows of each head for rotary positions as in transformers: the halves of pairs apart, not in turn."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return np.reshape(heads.swapaxes(1, 2), weight.shape)
