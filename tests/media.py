"""Tiny random models of multimodal families, and prompts for them: images and audio as tensors of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel

from families import DEVICE, TOKENS, WINDOW, randomise
from helpers import random_prompts

PLACEHOLDER = 3  # the token of an image, or of audio
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    **TOKENS,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
}
CLIP = {"model_type": "clip_vision_model", **VISION}
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
PATCHES = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LLAMA = {"model_type": "llama", **TEXT}
AUDIO = {
    "d_model": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_layers": 2,
    "num_hidden_layers": 2,
    "encoder_attention_heads": 4,
    "num_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}
Tensors = dict[str, torch.Tensor]


def images(*shape: int) -> Callable[[int], Tensors]:
    """Pixel values of some images, each of one shape."""
    return lambda count: {"pixel_values": torch.randn(count, *shape)}


def sized_images(*shape: int) -> Callable[[int], Tensors]:
    return lambda count: {
        **images(*shape)(count),
        "image_sizes": torch.tensor([shape[-2:]] * count),
    }


def grids(height: int, width: int, patch: int = 4) -> Callable[[int], Tensors]:
    """Flattened patches of some images of `height` × `width` patches, two frames each."""

    def patches(count: int) -> Tensors:
        return {
            "pixel_values": torch.randn(count * height * width, 3 * 2 * patch**2),
            "image_grid_thw": torch.tensor([[1, height, width]] * count),
        }

    return patches


def videos(frames: int, height: int, width: int, patch: int = 4) -> Callable[[int], Tensors]:
    """Flattened patches of some videos, whose frames are seconds apart: positions run ahead of tokens."""

    def patches(count: int) -> Tensors:
        return {
            "pixel_values_videos": torch.randn(count * frames * height * width, 3 * 2 * patch**2),
            "video_grid_thw": torch.tensor([[frames, height, width]] * count),
            "second_per_grid_ts": torch.tensor([9.0] * count),
        }

    return patches


def gemma4_images(count: int) -> Tensors:
    places = torch.tensor([[x, y] for y in range(4) for x in range(4)])
    return {"pixel_values": torch.rand(count, 16, 48), "image_position_ids": places.repeat(count, 1, 1)}


def mel(frames: int, mask: str | None = None) -> Callable[[int], Tensors]:
    def features(count: int) -> Tensors:
        found = {"input_features": torch.randn(count, 8, frames)}
        return found | ({mask: torch.ones(count, frames, dtype=torch.long)} if mask else {})

    return features


def lfm2_images(count: int) -> Tensors:
    return {
        "pixel_values": torch.randn(count, 16, 3 * 4 * 4),
        "pixel_attention_mask": torch.ones(count, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * count),
    }


def phi4_audio(count: int) -> Tensors:
    return {
        "audio_input_features": torch.randn(count, 61, 80),
        "audio_embed_sizes": torch.tensor([8] * count),
    }


@dataclass(frozen=True)
class Family:
    """A multimodal family: its config, the inputs for some images, and the placeholders that each of them takes."""

    config: dict[str, Any]
    media: Callable[[int], Tensors]
    tokens: int
    types: str | None = None  # the input that marks placeholders
    mode: str = "tree"
    placeholder: int = PLACEHOLDER
    kind: int = 1  # what marks a placeholder
    alone: bool = False  # one prompt of a batch cannot have images if another one has none


def vision(text: dict[str, Any], tower: dict[str, Any], **others: Any) -> dict[str, Any]:
    ids = {"image_token_id": PLACEHOLDER, "image_token_index": PLACEHOLDER, "video_token_id": 4}
    return {"text_config": text, "vision_config": tower, **ids, **others}


QWEN2_VL = vision(
    {**TEXT, "rope_parameters": MROPE},
    {**PATCHES, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    vision_start_token_id=5,
)
QWEN2_5_VL = vision(
    {**TEXT, "rope_parameters": MROPE},
    {**PATCHES, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "fullatt_block_indexes": [1]},
    vision_start_token_id=5,
)
QWEN3_VL = vision(
    {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
    {
        **PATCHES,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    vision_start_token_id=5,
    vision_end_token_id=6,
)
GLM4V = vision(
    {**TEXT, "rope_parameters": MROPE},
    {**PATCHES, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "image_size": 16},
    image_start_token_id=5,
    image_end_token_id=6,
    video_start_token_id=7,
    video_end_token_id=8,
)
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
GEMMA4_TEXT = {
    **TEXT,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "use_bidirectional_attention": "vision",
}
IDEFICS = {"scale_factor": 2, "pad_token_id": 0, "tie_word_embeddings": False}
PHI4 = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"},
    "audio_config": {
        "num_blocks": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
        "ext_pw_out_channel": 32,
        "audio_token_id": PLACEHOLDER,
    },
    "vision_config": {**VISION, "crop_size": 16, "image_token_id": 4},
}
QWEN3_5_TEXT = {
    **TEXT,
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**MROPE, "mrope_interleaved": True},
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

MEDIA: dict[str, Family] = {
    "llava": Family(vision(LLAMA, CLIP), images(3, 8, 8), 4),
    "llava:sliding": Family(
        vision({"model_type": "mistral", **TEXT, "sliding_window": WINDOW}, CLIP), images(3, 8, 8), 4
    ),
    "llava_next": Family(vision(LLAMA, CLIP, image_grid_pinpoints=[[8, 8]]), sized_images(2, 3, 8, 8), 4 + 2 * 3),
    "llava_onevision": Family(
        vision({"model_type": "qwen2", **TEXT}, SIGLIP, image_grid_pinpoints=[[8, 8]], vision_feature_layer=-1),
        sized_images(2, 3, 8, 8),
        4 + 2 * 3,
    ),
    "vipllava": Family(vision(LLAMA, CLIP, vision_feature_layers=[-1]), images(3, 8, 8), 4),
    "gemma3": Family(
        vision({**TEXT, **MIXED}, SIGLIP, mm_tokens_per_image=4), images(3, 8, 8), 4, types="token_type_ids"
    ),
    "gemma4": Family(
        vision(
            GEMMA4_TEXT,
            {**VISION, "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2},
            audio_token_id=8,
        ),
        gemma4_images,
        4,
        types="mm_token_type_ids",
    ),
    "paligemma": Family(
        vision({"model_type": "gemma", **TEXT}, {**SIGLIP, "projection_dim": 32}, projection_dim=32),
        images(3, 8, 8),
        4,
        types=None,
    ),
    "paligemma:2": Family(
        vision(
            {"model_type": "gemma2", **TEXT, **MIXED, "sliding_window": 160, "attn_logit_softcapping": None},
            {**SIGLIP, "projection_dim": 32},
            projection_dim=32,
        ),
        images(3, 8, 8),
        4,
    ),
    "qwen2_5_vl:video": Family(QWEN2_5_VL, videos(2, 2, 3), 12, types="mm_token_type_ids", placeholder=4, kind=2),
    "qwen2_vl": Family(QWEN2_VL, grids(2, 3), 6, types="mm_token_type_ids"),
    "qwen2_5_vl": Family(QWEN2_5_VL, grids(2, 3), 6, types="mm_token_type_ids"),
    "qwen3_vl": Family(QWEN3_VL, grids(2, 3), 6, types="mm_token_type_ids"),
    "glm4v": Family(GLM4V, grids(2, 3), 6, types="mm_token_type_ids"),
    "mistral3": Family(
        vision(
            {"model_type": "mistral", **TEXT, "sliding_window": None},
            {"model_type": "pixtral", **VISION},
            vision_feature_layer=-1,
            spatial_merge_size=1,
        ),
        sized_images(3, 8, 8),
        4,
    ),
    "internvl": Family(
        vision({"model_type": "qwen2", **TEXT}, VISION, image_seq_length=1, downsample_ratio=0.5),
        images(3, 8, 8),
        1,
    ),
    "idefics3": Family(vision(LLAMA, {**VISION, "image_size": 16}, **IDEFICS), images(1, 3, 16, 16), 4, alone=True),
    "smolvlm": Family(vision(LLAMA, {**VISION, "image_size": 16}, **IDEFICS), images(1, 3, 16, 16), 4, alone=True),
    "aya_vision": Family(
        vision({"model_type": "cohere2", **TEXT, **MIXED}, SIGLIP, downsample_factor=2, adapter_layer_norm_eps=1e-5),
        images(3, 8, 8),
        1,
    ),
    "cohere2_vision": Family(
        vision({"model_type": "cohere2", **TEXT, **MIXED}, SIGLIP, downsample_factor=2, alignment_intermediate_size=32),
        images(3, 8, 8),
        1,
    ),
    "qwen3_5": Family(
        vision(
            QWEN3_5_TEXT,
            {
                **PATCHES,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "intermediate_size": 32,
                "num_position_embeddings": 16,
            },
            vision_start_token_id=5,
            vision_end_token_id=6,
        ),
        grids(2, 3),
        6,
        types="mm_token_type_ids",
        mode="chain",
    ),
    "lfm2_vl": Family(
        vision(
            {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"], "block_ff_dim": 32},
            {"model_type": "siglip2_vision_model", **VISION, "num_patches": 16},
            downsample_factor=2,
            projector_hidden_size=32,
        ),
        lfm2_images,
        4,
        mode="chain",
    ),
    "phi4_multimodal": Family(PHI4, phi4_audio, 8),
    "voxtral": Family(
        {
            "text_config": LLAMA,
            "audio_config": {**AUDIO, "encoder_ffn_dim": 128, "intermediate_size": 128},
            "audio_token_id": PLACEHOLDER,
        },
        mel(32),
        4,
    ),
    "qwen2_audio": Family(
        {"text_config": {"model_type": "qwen2", **TEXT}, "audio_config": AUDIO, "audio_token_index": PLACEHOLDER},
        mel(32, "feature_attention_mask"),
        8,
    ),
}


def media_model(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The random model of a family."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.partition(":")[0]](**MEDIA[name].config)
    config.pad_token_id = TOKENS["pad_token_id"]
    return randomise(AutoModelForMultimodalLM.from_config(config), dtype)


def media_prompts(name: str, num_images: list[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    """A left-padded batch of prompts of different lengths, with some images each."""
    family = MEDIA[name]
    torch.manual_seed(seed)
    rows = []
    for i, count in enumerate(num_images):
        start, *parts = random_prompts(3 + i, *[4 + 2 * i] * max(count, 1), seed=seed + i)
        row = [token + 6 for token in start]
        for part in parts:
            row += [family.placeholder] * (family.tokens if count else 0) + [token % 80 + 10 for token in part]
        rows.append(row)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    inputs: Tensors = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if family.types is not None:
        inputs[family.types] = (ids == family.placeholder).long() * family.kind
    if sum(num_images):
        inputs |= family.media(sum(num_images))
    return {key: x.to(DEVICE, dtype if x.is_floating_point() else x.dtype) for key, x in inputs.items()}
