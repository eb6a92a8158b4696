"""Tool calls: what a model is told about tools, and the calls in what it answers."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookfar.server.config import Limits
from lookfar.server.errors import invalid
from lookfar.server.limits import checked_schema
from lookfar.server.schemas import ChatBody, NamedTool, Tool, ToolCall
from lookfar.server.stop_strings import overlap

# How models mark a call: Hermes, Qwen, SmolLM and Granite; Mistral; Llama 3.
OPENINGS = ("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>")
ARGUMENTS = ("arguments", "parameters", "args")


@dataclass(frozen=True)
class CallFormat:
    """How tool calls appear in the answer to a request."""

    names: frozenset[str]
    forced: str | None = None  # the answer consists of this function's arguments
    required: bool = False  # the answer is a list of calls
    parallel: bool = True


def call_format(body: ChatBody) -> CallFormat | None:
    """Return how tool calls appear in the answer; None if there are none."""
    if body.tool_choice not in (None, "none") and not body.tools:
        raise invalid("tool_choice", "tool_choice needs tools.")
    if not body.tools or body.tool_choice == "none":
        return None
    names = frozenset(tool.function.name for tool in body.tools)
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, NamedTool):
        if body.tool_choice.function.name not in names:
            raise invalid("tool_choice", f"There is no tool {body.tool_choice.function.name[:64]!r} among tools.")
        return CallFormat(names, body.tool_choice.function.name, parallel=parallel)
    return CallFormat(names, required=body.tool_choice == "required", parallel=parallel)


def template_tools(tools: list[Tool], limits: Limits) -> list[dict[str, Any]]:
    """Return the tools as chat templates take them."""
    found = [tool.model_dump(exclude_none=True) for tool in tools]
    checked_schema("tools", {"tools": found}, limits)
    return found


def template_call(call: ToolCall) -> dict[str, Any]:
    """Return an earlier call as chat templates take it: with arguments as an object, where they are one."""
    arguments: Any = call.function.arguments
    try:
        value = json.loads(arguments)
        arguments = value if isinstance(value, dict) else arguments
    except (ValueError, RecursionError):
        pass
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def call_constraint(call: CallFormat, tools: list[Tool], limits: Limits) -> dict[str, Any]:
    """Return the constraint of an answer that has to be a tool call."""
    parameters = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in tools}
    if call.forced is not None:
        return {"json_schema": checked_schema("tools", parameters[call.forced], limits)}
    if not call.required:
        return {}
    one = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in parameters
    ]
    calls: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "maxItems": 8 if call.parallel else 1,
        "items": {"anyOf": one},
        "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in parameters.items()},
    }
    return {"json_schema": checked_schema("tools", calls, limits)}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema as a part of another one: references into itself begin with its place."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        made["$ref"] = place + reference.removeprefix("#")
    return made


def parse_calls(text: str, call: CallFormat) -> tuple[str, list[dict[str, Any]]]:
    """Return the text in front of the tool calls, and the calls in OpenAI's form; no calls if there are none."""
    if call.forced is not None:
        return "", [_as_call(call.forced, text)]
    content, marked = split_opening(text)
    is_json = not marked and text.lstrip().startswith(("{", "["))
    if call.required or is_json:
        content, marked = "", text
    found = [_as_call(item["name"], _arguments(item)) for item in _json_objects(marked) if _is_call(item, call.names)]
    return (content, found if call.parallel else found[:1]) if found else (text, [])


def split_opening(text: str) -> tuple[str, str]:
    """Split a text where its tool calls begin."""
    places = [place for place in (text.find(opening) for opening in OPENINGS) if place >= 0]
    return (text[: min(places)], text[min(places) :]) if places else (text, "")


def _is_call(item: Any, names: frozenset[str]) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("name"), str) and item["name"] in names


def _arguments(item: Mapping[str, Any]) -> str:
    arguments: Any = next((item[name] for name in ARGUMENTS if name in item), {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_call(name: str, arguments: str) -> dict[str, Any]:
    made = secrets.token_hex(12)
    return {"id": f"call_{made}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _json_objects(text: str) -> list[Any]:
    """Return the JSON objects in a text, those in lists included."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while (match := re.search(r"[\[{]", text[place:])) is not None:
        place += match.start()
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        found += value if isinstance(value, list) else [value]
    return found


class CallFilter:
    """Holds back the part of a streamed answer that is, or may become, a tool call."""

    def __init__(self, call: CallFormat) -> None:
        self._holds_all = call.forced is not None or call.required
        self._held = ""
        self._started = False

    def add(self, piece: str) -> str:
        """Return the text that is certainly in front of any tool call."""
        self._held += piece
        beginning = self._held.lstrip()
        if not self._started and (not beginning or beginning[0] in "{["):
            return ""
        self._started = True
        if self._holds_all or split_opening(self._held)[1]:
            return ""
        held = max(overlap(self._held, opening) for opening in OPENINGS)
        text, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return text

    @property
    def held(self) -> str:
        return self._held
