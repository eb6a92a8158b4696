"""The types of the keyword arguments of `LM.generate`, `LM.stream` and `LM.chat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any, TypedDict

import torch

from lookfar.drafters.registry import StrategySpec
from lookfar.speculation.row_budget import Budget


class GenerationArguments(TypedDict, total=False):
    """Arguments of `model.generate` that mean the same here, then those that lookfar adds to them."""

    max_length: int | None
    min_length: int | None
    min_new_tokens: int | None
    max_time: float | None
    stop_strings: str | Seq[str] | None
    eos_token_id: int | Seq[int] | None
    pad_token_id: int | None
    bos_token_id: int | None

    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    top_h: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None

    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    exponential_decay_length_penalty: tuple[int, float] | None
    bad_words_ids: Seq[Seq[int]] | None
    sequence_bias: Any
    suppress_tokens: Seq[int] | None
    begin_suppress_tokens: Seq[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Seq[int] | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    watermarking_config: Any

    logits_processor: Any
    stopping_criteria: Any
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None

    presence_penalty: float
    frequency_penalty: float
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None


class GenerateOptions(GenerationArguments, total=False):
    """All options of a call."""

    max_new_tokens: int | None
    strategy: StrategySpec
    budget: Budget
    seed: int | None
    generator: torch.Generator | None
    reuse: bool
