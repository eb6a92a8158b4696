"""Checks of what a request asks for against the limits of the server."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

from lookfar.lm import LM
from lookfar.server.config import Limits
from lookfar.server.errors import ApiError, invalid

# Small models write blanks without end where a grammar lets them: JSON has one space behind commas and colons.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
GUIDANCE = {"x-guidance": {**SPACING, "coerce_one_of": True}}  # oneOf is taken as anyOf
MAX_DEPTH = 64  # of a JSON schema
_longest_tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # characters of a tokenizer's longest token


def check_count(param: str, value: int, limit: int) -> None:
    if value > limit:
        raise invalid(param, f"{param} is at most {limit} on this server, not {value}.")


def check_text_length(lm: LM, text: str, param: str) -> None:
    """Refuse a text that cannot fit the model, however long its tokens are: reading megabytes takes seconds."""
    limit, tokenizer = lm.engine.max_length, lm.tokenizer
    if limit is None or tokenizer is None:
        return
    if tokenizer not in _longest_tokens:
        _longest_tokens[tokenizer] = max(map(len, tokenizer.get_vocab()), default=1)
    if len(text) > limit * _longest_tokens[tokenizer]:
        raise ApiError(
            400,
            f"The prompt has {len(text)} characters, which are more than the {limit} tokens that fit this model.",
            param,
            "context_length_exceeded",
        )


def checked_stops(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > limits.stops:
        raise invalid("stop", f"stop holds at most {limits.stops} texts, not {len(stops)}.")
    if any(not text for text in stops):
        raise invalid("stop", "stop holds an empty text: give at least one character.")
    if any(len(text) > limits.stop_length for text in stops):
        raise invalid("stop", f"A stop text has at most {limits.stop_length} characters.")
    return tuple(dict.fromkeys(stops))


def checked_schema(param: str, schema: dict[str, Any] | str, limits: Limits) -> str:
    """Return a JSON schema as text, if it is small enough and refers to nothing outside of itself."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value)
    except (ValueError, RecursionError):
        raise invalid(param, f"{param} is not JSON.") from None
    if len(text) > limits.schema_bytes:
        raise invalid(param, f"{param} has at most {limits.schema_bytes} bytes, not {len(text)}.")
    if not isinstance(value, dict):
        raise invalid(param, f"{param} is a JSON object.")
    _check_references(param, value, 0)
    return json.dumps(GUIDANCE | value)


def _check_references(param: str, value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise invalid(param, f"{param} is nested deeper than {MAX_DEPTH} levels.")
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise invalid(param, f"{param} refers to {reference[:100]!r}: only references into itself are followed.")
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_references(param, child, depth + 1)


def checked_regex(param: str, regex: str, limits: Limits) -> str:
    """Return a regular expression that is short enough."""
    if len(regex) > limits.regex_length:
        raise invalid(param, f"A regular expression has at most {limits.regex_length} characters, not {len(regex)}.")
    return regex


def check_model(name: str | None, served: str) -> None:
    """Refuse a request for another model."""
    if name is not None and name != served:
        raise ApiError(404, f"The model {name[:100]!r} is not served here: use {served!r}.", "model", "model_not_found")
