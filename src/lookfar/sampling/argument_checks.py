"""Checks of generation arguments that transformers accepts and then ignores, or fails on later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
