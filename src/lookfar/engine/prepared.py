"""Prompts as `generate` prepares them: outputs of a processor, and sources of an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from lookfar.engine.request import FirstPass
from lookfar.errors import RequestError, first_sentence
from lookfar.models.first_forward import FirstForward, ends_with_image

UNKNOWN_TOKEN = 0  # stands for tokens that were given as KV, as embeddings, or as placeholders of an image


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt, and the first forward pass that transformers has to run for it, if any."""

    ids: list[int]  # what is decoded from
    source: tuple[int, ...] = ()  # what only an encoder reads, if the decoder has the same vocabulary
    first: FirstPass | None = None


def prepare_prompts(model: PreTrainedModel, given: Mapping[str, Any], vocab_size: int) -> list[PreparedPrompt]:
    """Return the prompts of a call with images, audio or a source.

    `generate` itself prepares them: it runs an encoder and finds positions and the first tokens to decode from.
    """
    if type(model).generate is not GenerationMixin.generate:
        raise RequestError(
            f"{type(model).__name__} has a generate method of its own: use lookfar.accelerate(model) and call that."
        )
    call: dict[str, Any] = {}

    def collect(model: Any, input_ids: torch.Tensor, inputs_tensor: Any = None, **prepared: Any) -> torch.Tensor:
        call.update(input_ids=input_ids, encoder_input=inputs_tensor, inputs=prepared)
        return input_ids

    options = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    try:
        model.generate(**given, **options, custom_generate=collect)
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise RequestError(f"The model cannot take this prompt: {first_sentence(error)}.") from error
    for name in ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"):
        call["inputs"].pop(name, None)
    return _rows(model, given, call, vocab_size)


def _rows(
    model: PreTrainedModel, given: Mapping[str, Any], call: Mapping[str, Any], vocab_size: int
) -> list[PreparedPrompt]:
    ids, inputs = call["input_ids"], call["inputs"]
    if ends_with_image(inputs.get("position_ids")):
        raise RequestError("A prompt cannot end with an image: add some text after it.")
    has_encoder = model.config.is_encoder_decoder
    mask = inputs.get("attention_mask")
    pads = [0] * len(ids) if has_encoder or mask is None else (mask == 0).sum(-1).tolist()
    first, prompts = FirstForward(model, ids, inputs, pads, given), []
    for row, pad in enumerate(pads):
        source: list[int] = []
        if has_encoder:
            source = source_tokens(
                model, call["encoder_input"][row], mask[row] if mask is not None else None, vocab_size
            )
        tokens = [token if token < vocab_size else UNKNOWN_TOKEN for token in ids[row, pad:].tolist()]
        prompts.append(PreparedPrompt(tokens, tuple(source), FirstPass(first, row, len(source))))
    return prompts


def source_tokens(model: PreTrainedModel, read: torch.Tensor, mask: torch.Tensor | None, vocab_size: int) -> list[int]:
    """Return the tokens that an encoder has read, if the decoder has the same ones: answers may copy them."""
    if (
        read.ndim != 1
        or read.is_floating_point()
        or not getattr(model.config, "share_encoder_decoder_embeddings", True)
    ):
        return []
    if mask is not None and len(mask) == len(read):
        read = read[mask.bool()]
    tokens: list[int] = read.tolist()
    return tokens if tokens and min(tokens) >= 0 and max(tokens) < vocab_size else []
