"""POST /v1/responses: text in, text out. Nothing is stored, so every request carries its whole conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from lookfar.lm import LM
from lookfar.server.chat import prompt_ids
from lookfar.server.choices import Choice, make_choices, usage
from lookfar.server.config import Limits
from lookfar.server.errors import invalid
from lookfar.server.identity import Identity
from lookfar.server.jobs import Job
from lookfar.server.keys import Tenant
from lookfar.server.parameters import Asked, job_of
from lookfar.server.schemas import (
    GenerationBody,
    InputMessage,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    ResponsesBody,
    TextPart,
)
from lookfar.server.service import Generation
from lookfar.server.streaming import deltas, event


def responses_job(lm: LM, body: ResponsesBody, tenant: Tenant, limits: Limits) -> Job:
    """Return the job of a request."""
    given = body.input
    items = [InputMessage(role="user", content=given)] if isinstance(given, str) else given
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages += [Message(role=item.role, content=_text(item)) for item in items]
    common = GenerationBody(
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stream=body.stream,
        priority=body.priority,
        lookfar=body.lookfar,
        response_format=_format(body),
    )
    return job_of(lm, common, Asked([prompt_ids(lm, messages)], body.max_output_tokens), tenant, limits)


def _text(item: InputMessage) -> str:
    if isinstance(item.content, str):
        return item.content
    return "".join(part.text for part in item.content if isinstance(part, TextPart))


def _format(body: ResponsesBody) -> ResponseFormat | None:
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    if given.type == "json_schema" and given.json_schema is None:
        raise invalid("text.format.schema", "text.format of type json_schema needs a schema.")
    schema = JsonSchemaFormat.model_validate({"schema": given.json_schema}) if given.json_schema is not None else None
    return ResponseFormat(type=given.type, json_schema=schema)


async def response(lm: LM, body: ResponsesBody, generation: Generation, identity: Identity) -> dict[str, Any]:
    """Return the whole response."""
    (choice,) = choices = make_choices(lm.tokenizer, generation.job, generation.prepared)
    async for _ in deltas(generation, choices):
        pass
    return _finished(body, generation, identity, choice)


async def response_events(
    lm: LM, body: ResponsesBody, generation: Generation, identity: Identity
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed response."""
    (choice,) = choices = make_choices(lm.tokenizer, generation.job, generation.prepared)
    number = -1

    def numbered(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    item_id = f"msg_{identity.request_id}"
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    yield numbered("response.created", response=_head(body, identity, "in_progress"))
    yield numbered("response.in_progress", response=_head(body, identity, "in_progress"))
    empty = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    yield numbered("response.output_item.added", output_index=0, item=empty)
    yield numbered("response.content_part.added", **place, part=_part(""))
    async for parts in deltas(generation, choices):
        for delta in parts:
            if delta.text:
                yield numbered("response.output_text.delta", **place, delta=delta.text, logprobs=[])
    finished = _finished(body, generation, identity, choice)
    yield numbered("response.output_text.done", **place, text=choice.text, logprobs=[])
    yield numbered("response.content_part.done", **place, part=_part(choice.text))
    yield numbered("response.output_item.done", output_index=0, item=finished["output"][0])
    yield numbered(f"response.{finished['status']}", response=finished)


def _finished(body: ResponsesBody, generation: Generation, identity: Identity, choice: Choice) -> dict[str, Any]:
    status = "completed" if choice.finish_reason == "stop" else "incomplete"
    made = _head(body, identity, status)
    if status == "incomplete":
        made["incomplete_details"] = {"reason": "max_output_tokens"}
    counts = usage([choice], generation.job)
    made["output"] = [
        {
            "id": f"msg_{identity.request_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(choice.text)],
        }
    ]
    made["usage"] = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "lookfar": counts["lookfar"],
    }
    return made


def _head(body: ResponsesBody, identity: Identity, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{identity.request_id}",
        "object": "response",
        "created_at": identity.created,
        "status": status,
        "model": identity.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": body.text.format.type if body.text and body.text.format else "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
