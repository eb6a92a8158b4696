"""Validation errors of bodies → one error in OpenAI's form, which names the field."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from fastapi.exceptions import RequestValidationError

from lookfar.server.errors import ApiError, invalid

MAX_NAME = 100  # characters of a field that a message shows


def validation_error(error: RequestValidationError) -> ApiError:
    """Return the error of the field that the first, or the most specific, complaint is about."""
    complaints = error.errors()
    if any(one["type"] == "json_invalid" for one in complaints):
        return ApiError(400, "The body is not JSON.")
    if complaints[0]["loc"][0] != "body":  # of the query
        name = str(complaints[0]["loc"][-1])
        return invalid(name, f"{name}: {complaints[0]['msg']}.")
    if len(complaints[0]["loc"]) == 1 and complaints[0]["type"] != "missing":
        return ApiError(400, "The body is no JSON object: send one, with the header Content-Type: application/json.")
    found = [(field_of(one["loc"], error.body, one["type"]), one) for one in complaints]
    field, complaint = max(found, key=lambda pair: len(pair[0]))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field).lstrip(".") or None
    if complaint["type"] == "extra_forbidden":
        name = repr(field[-1]) if not param or len(param) > MAX_NAME else param
        return invalid(param, f"Unknown field {name[:MAX_NAME]}: remove it.")
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
