"""Checkpoints of tiny random models with random multi-token-prediction layers, named as in published ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, modeling_layers

from families import DEVICE, MIXED, tiny_model

needs_mtp = pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="transformers before 5.22")
# Family → the number of prediction layers, and how they are stored: behind the model's own layers, as DeepSeek and GLM
# do; under `mtp` with Qwen's names, which know a single layer; or under `mtp` with the names of transformers.
LAYOUTS: dict[str, tuple[int, str]] = {
    "deepseek_v3": (2, "behind"),
    "glm4_moe": (1, "behind"),
    "mellum": (1, "qwen"),
    "qwen3_next": (1, "qwen"),
    "qwen3_5_text": (1, "qwen"),
    "bailing_hybrid": (1, "behind"),
    "inkling_text": (2, "own"),
}
RECURRENT_HEADS = ("qwen3_next", "qwen3_5_text", "bailing_hybrid", "inkling_text")
# What a published config says about the layers, where transformers does not have it: Qwen3-Next's says nothing.
SAID = {"qwen3_next": {}, "qwen3_5_text": {"mtp_num_hidden_layers": 1}}
QWEN_NAMES = {
    "layers.0.eh_proj.": "fc.",
    "layers.0.enorm.": "pre_fc_norm_embedding.",
    "layers.0.hnorm.": "pre_fc_norm_hidden.",
    "layers.0.post_norm.": "norm.",
    "layers.0.mtp_block.": "layers.0.",
}
Weights = dict[str, torch.Tensor]


def model_with_heads(
    family: str, folder: Path, patch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    """Save a random model with random prediction layers, and load the model."""
    save_with_heads(family, folder, patch)
    return load_saved(folder, dtype)


def load_saved(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Load the model of a checkpoint, without prediction layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def save_with_heads(family: str, folder: Path, patch: pytest.MonkeyPatch) -> Weights:
    """Save a random model with random prediction layers; returns the weights of those."""
    number, layout = LAYOUTS[family]
    main = tiny_model(family, **MIXED if family == "mellum" else {})
    config = main.config
    before = dict(vars(config))
    config.num_mtp_layers = number
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None) is not None and getattr(config, f"mtp_{name}", None) is None:
            setattr(config, f"mtp_{name}", [getattr(config, name)[-1]] * number)
    if family == "mellum":
        config.mtp_layer_types = ["sliding_attention"]
    torch.manual_seed(1)
    heads = modeling_layers.MtpModel(main, number).to(torch.float64)
    with torch.no_grad():
        for parameter in heads.layers.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    if family in SAID:
        for name in set(vars(config)) - set(before):
            delattr(config, name)
        config.update(SAID[family])
    shared = ("embed_tokens", "shared_head")
    weights = {name: weight for name, weight in heads.state_dict().items() if not name.startswith(shared)}
    main.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = {name: weight.contiguous() for name, weight in published(weights, layout, config).items()}
    save_file({**load_file(file), **stored}, file, {"format": "pt"})
    # The class names the layers of the published sizes.
    behind = [rf"model\.layers\.{config.num_hidden_layers + i}\." for i in range(number)]
    patch.setattr(type(main), "_keys_to_ignore_on_load_unexpected", behind if layout == "behind" else [r"^mtp\."])
    return weights


def published(weights: Weights, layout: str, config: PreTrainedConfig) -> Weights:
    """Rename the weights of prediction layers as a checkpoint of some layout does."""
    if layout == "own":
        return {f"mtp.{name}": weight for name, weight in weights.items()}
    found = {}
    for name, weight in weights.items():
        if layout == "qwen":
            old = next(part for part in QWEN_NAMES if name.startswith(part))
            found[f"mtp.{QWEN_NAMES[old]}{name.removeprefix(old)}"] = weight
        else:
            number, rest = re.fullmatch(r"layers\.(\d+)\.(?:mtp_block\.)?(.*)", name).groups()  # type: ignore[union-attr]
            rest = re.sub(r"^post_norm\.", "shared_head.norm.", rest)
            found[f"model.layers.{config.num_hidden_layers + int(number)}.{rest}"] = weight
    return split_experts(found)


def split_experts(weights: Weights) -> Weights:
    """Store every expert under a name of its own."""
    found = {}
    for name, weight in weights.items():
        start, _, part = name.partition(".experts.")
        if part not in ("gate_up_proj", "down_proj"):
            found[name] = weight
            continue
        for i, expert in enumerate(weight):
            names = part.replace("gate_up_proj", "gate_proj up_proj").split()
            for key, value in zip(names, expert.chunk(len(names)), strict=True):
                found[f"{start}.experts.{i}.{key}.weight"] = value
    return found
