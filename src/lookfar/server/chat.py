"""POST /v1/chat/completions."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookfar.errors import LookfarError, first_sentence
from lookfar.lm import LM
from lookfar.prompts import chat_text
from lookfar.server.choices import Choice, Delta, make_choices, usage
from lookfar.server.config import Limits
from lookfar.server.errors import invalid
from lookfar.server.identity import Identity
from lookfar.server.images import image_of
from lookfar.server.jobs import Job, Prompt
from lookfar.server.keys import Tenant
from lookfar.server.limits import check_text_length
from lookfar.server.parameters import Asked, checked_ids, job_of
from lookfar.server.schemas import ChatBody, ImagePart, Message, TextPart
from lookfar.server.service import Generation
from lookfar.server.streaming import DONE, deltas, event
from lookfar.server.token_texts import chat_logprobs
from lookfar.server.tools import (
    CallFilter,
    CallFormat,
    call_constraint,
    call_format,
    parse_calls,
    template_call,
    template_tools,
)
from lookfar.server.trace import traced

TEMPLATE_PARAMETERS = frozenset(
    name
    for function in (PreTrainedTokenizerBase.apply_chat_template, chat_text)
    for name in inspect.signature(function).parameters
)


def chat_job(lm: LM, body: ChatBody, tenant: Tenant, limits: Limits) -> Job:
    """Return the job of a request."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    call = call_format(body)
    tools = template_tools(body.tools, limits) if call is not None and body.tools else None
    prompt = chat_prompt(lm, body.messages, tools, body.chat_template_kwargs)
    max_tokens = body.max_completion_tokens or body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    constraint = call_constraint(call, body.tools or [], limits) if call is not None else None
    return job_of(lm, body, Asked([prompt], max_tokens, top, constraint), tenant, limits)


def chat_prompt(
    lm: LM, messages: list[Message], tools: list[dict[str, Any]] | None = None, more: dict[str, Any] | None = None
) -> Prompt:
    """Return a conversation as a prompt: token ids, or what the model's processor makes of its images."""
    if not any(has_images(message) for message in messages):
        return prompt_ids(lm, messages, tools, more)
    if lm.processor is None or not lm.engine.runner.model.support.takes_media:
        raise invalid("messages", "This model takes no images: send text parts only.")
    if tools is not None or more:
        raise invalid("messages", "Images cannot be combined with tools or chat_template_kwargs.")
    made = [template_message(message, i) for i, message in enumerate(messages)]
    try:
        prompt: Prompt = lm.chat_prompt(made)
    except LookfarError as error:
        raise invalid("messages", str(error)) from error
    return prompt


def has_images(message: Message) -> bool:
    return isinstance(message.content, list) and any(isinstance(part, ImagePart) for part in message.content)


def prompt_ids(
    lm: LM, messages: list[Message], tools: list[dict[str, Any]] | None = None, more: dict[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a conversation of texts in the model's chat template."""
    of_processor = lm.processor is not None and bool(getattr(lm.processor, "chat_template", None))
    template: Any = lm.processor if of_processor else lm.tokenizer
    if tools is not None and "tools" not in str(getattr(template, "chat_template", None)):
        raise invalid("tools", "The chat template of this model does not take tools.")
    for name in more or {}:
        if not name.isidentifier() or name in TEMPLATE_PARAMETERS:
            raise invalid("chat_template_kwargs", f"{name[:64]!r} is not for a chat template.")
    try:
        made = [template_message(message, i) for i, message in enumerate(messages)]
        arguments = {**(more or {}), **({"tools": tools} if tools is not None else {})}
        text = chat_text(made, template, of_processor, **arguments)
    except LookfarError as error:
        raise invalid("messages", str(error)) from error
    except Exception as error:  # a template may raise anything; many refuse messages in another order
        if isinstance(getattr(error, "param", None), str):
            raise
        raise invalid("messages", f"The chat template refuses these messages: {first_sentence(error)}.") from error
    check_text_length(lm, text, "messages")
    return checked_ids(lm, lm.template_ids(text), "messages")


def template_message(message: Message, place: int) -> dict[str, Any]:
    """Return a message as chat templates take it."""
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list) and has_images(message):
        made["content"] = [_part_of(part, f"messages[{place}].content[{i}]") for i, part in enumerate(message.content)]
    elif isinstance(message.content, list):
        made["content"] = "".join(part.text for part in message.content if isinstance(part, TextPart))
    else:
        made["content"] = message.content or ""
    if message.tool_calls:
        made["tool_calls"] = [template_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    return made


def _part_of(part: TextPart | ImagePart, param: str) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
    return {"type": "image", "image": image_of(url, param)}


async def chat_response(lm: LM, body: ChatBody, generation: Generation, identity: Identity) -> dict[str, Any]:
    """Return the whole response."""
    choices = make_choices(lm.tokenizer, generation.job, generation.prepared)
    async for _ in deltas(generation, choices):
        pass
    return {
        **identity.of("chatcmpl", "chat.completion"),
        "choices": [_answer(lm, body, choice) for choice in choices],
        "usage": usage(choices, generation.job),
    }


def _answer(lm: LM, body: ChatBody, choice: Choice) -> dict[str, Any]:
    call = call_format(body)
    text, calls = parse_calls(choice.text, call) if call is not None else (choice.text, [])
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(lm, choice.logprobs, body.top_logprobs or 0) if body.logprobs else None,
        "finish_reason": "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason,
    }


async def chat_events(lm: LM, body: ChatBody, generation: Generation, identity: Identity) -> AsyncIterator[bytes]:
    """Yield the chunks of a streamed response."""
    choices = make_choices(lm.tokenizer, generation.job, generation.prepared)
    head = identity.of("chatcmpl", "chat.completion.chunk")
    call = call_format(body)
    filters = [CallFilter(call) for _ in choices] if call is not None else None
    for choice in choices:
        yield event({**head, "choices": [_delta(choice.index, {"role": "assistant", "content": ""})]})
    async for parts in deltas(generation, choices):
        for delta in parts:
            if call is not None and filters is not None:
                content, reason = _filtered(delta, filters[delta.index], call)
            else:
                content, reason = {"content": delta.text}, delta.finish_reason
            part = _delta(delta.index, content, reason)
            if body.logprobs:
                part["logprobs"] = chat_logprobs(lm, delta.logprobs, body.top_logprobs or 0)
            yield event({**head, "choices": [part | traced(lm, body.lookfar, delta)]})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": usage(choices, generation.job)})
    yield DONE


def _filtered(delta: Delta, calls: CallFilter, call: CallFormat) -> tuple[dict[str, Any], str | None]:
    """Return the part of a streamed answer whose tool calls come as a whole at its end, and the finish reason."""
    content: dict[str, Any] = {"content": calls.add(delta.text)}
    if delta.finish_reason is None:
        return content, None
    text, found = parse_calls(calls.held, call)
    content["content"] += text
    if not found:
        return content, delta.finish_reason
    content["tool_calls"] = [{"index": i, **one} for i, one in enumerate(found)]
    return content, "tool_calls" if delta.finish_reason == "stop" else delta.finish_reason


def _delta(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
