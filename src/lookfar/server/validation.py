"""Validation errors of bodies → one error in OpenAI's form, which names the field."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from fastapi.exceptions import RequestValidationError

from lookfar.server.errors import ApiError, invalid


def validation_error(error: RequestValidationError) -> ApiError:
    """Return the error of the field that the first, or the most specific, complaint is about."""
    complaints = error.errors()
    if any(one["type"] == "json_invalid" for one in complaints):
        return ApiError(400, "The body is not JSON.")
    found = [(field_of(one["loc"], error.body, one["type"]), one) for one in complaints]
    field, complaint = max(found, key=lambda pair: len(pair[0]))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field).lstrip(".") or None
    if complaint["type"] == "extra_forbidden":
        return invalid(param, f"Unknown field {param}: remove it.")
    if complaint["type"] == "missing":
        return invalid(param, f"The field {param} is missing." if param else "The body is empty: send a JSON object.")
    return invalid(param, f"{param or 'The body'}: {complaint['msg']}.")


def field_of(place: Seq[str | int], body: Any, kind: str) -> list[str | int]:
    """Return the path of a field in a body; a place also names the alternatives of a type, which are left out."""
    field: list[str | int] = []
    for i, part in enumerate(place[1:], start=1):
        in_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if in_list or (isinstance(body, dict) and part in body):
            body = body[part]
        elif kind == "missing" and i == len(place) - 1:
            pass
        else:
            continue
        field.append(part)
    return field
