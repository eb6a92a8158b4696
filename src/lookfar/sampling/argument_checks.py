"""Checks of generation arguments that transformers accepts and then ignores, or fails on later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lookfar.errors import RequestError

NUMBERS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "max_time",
)


def check_arguments(arguments: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse values without a meaning."""
    for name in NUMBERS:
        value = arguments.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise RequestError(f"{name} must be a number, not {value!r}.")
        if value is not None and not math.isfinite(value):
            raise RequestError(f"{name} must be a finite number, not {value}.")
    first = arguments.get("forced_bos_token_id")
    if first is not None and (type(first) is not int or first not in range(vocab_size)):
        raise RequestError(f"forced_bos_token_id must be a token id below {vocab_size}, not {first!r}.")
    for name in ("logits_processor", "stopping_criteria"):
        given = arguments.get(name) or ()
        if not isinstance(given, (list, tuple)) or not all(map(callable, given)):
            raise RequestError(f"{name} takes a list of functions or objects that can be called.")
    function = arguments.get("prefix_allowed_tokens_fn")
    if function is not None and not callable(function):
        raise RequestError("prefix_allowed_tokens_fn takes a function of the batch index and the token ids.")
    top_p = arguments.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise RequestError(f"top_p must be above 0 and at most 1, not {top_p}.")
    stops = arguments.get("stop_strings")
    if stops is not None and (not stops or "" in list(stops)):
        raise RequestError("stop_strings holds an empty text: give at least one character.")
    if any(not words for words in arguments.get("bad_words_ids") or ()):
        raise RequestError("bad_words_ids holds an empty list: give the token ids of each word.")


def checked_generator(
    seed: int | None, generator: torch.Generator | None, device: torch.device
) -> torch.Generator | None:
    """Return the generator to sample with; None: torch's own."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise RequestError(f"generator takes a torch.Generator, not {type(generator).__name__}.")
    if seed is None:
        return generator
    if generator is not None:
        raise RequestError("Give a seed or a generator, not both.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise RequestError(f"seed must be a whole number, not {seed!r}.")
    if not -(1 << 63) <= seed < 1 << 64:
        raise RequestError(f"seed must fit into 64 bits, and {seed} does not.")
    return torch.Generator(device).manual_seed(seed)
