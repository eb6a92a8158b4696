"""Checks of generation arguments that transformers accepts and then ignores, or fails on later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lookfar.errors import RequestError


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse values without a meaning."""
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        value = arguments.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise RequestError(f"{name} must be a number, not {value!r}.")
        if value is not None and not math.isfinite(value):
            raise RequestError(f"{name} must be a finite number, not {value}.")
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
    if seed is None:
        return generator
    if generator is not None:
        raise RequestError("Give a seed or a generator, not both.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise RequestError(f"seed must be a whole number, not {seed!r}.")
    if not -(1 << 63) <= seed < 1 << 64:
        raise RequestError(f"seed must fit into 64 bits, and {seed} does not.")
    return torch.Generator(device).manual_seed(seed)
