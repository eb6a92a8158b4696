"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from lookfar.lm import LM
from lookfar.server.choices import Choice, make_choices, usage
from lookfar.server.config import Limits
from lookfar.server.errors import invalid
from lookfar.server.identity import Identity
from lookfar.server.jobs import Job, Prompt
from lookfar.server.keys import Tenant
from lookfar.server.limits import check_count, check_text_length
from lookfar.server.logprobs import TokenLogprob
from lookfar.server.parameters import Asked, checked_ids, job_of
from lookfar.server.schemas import CompletionBody
from lookfar.server.service import Generation
from lookfar.server.streaming import DONE, deltas, event
from lookfar.server.token_texts import shown_logprob, token_text
from lookfar.server.trace import traced

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completion_job(lm: LM, body: CompletionBody, tenant: Tenant, limits: Limits) -> Job:
    """Return the job of a request."""
    if body.echo and body.logprobs is not None:
        raise invalid("echo", "echo cannot be combined with logprobs: the prompt's log-probabilities are not computed.")
    given: Any = body.prompt
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    check_count("prompt", len(prompts), limits.prompts)
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text_length(lm, prompt, "prompt")
    ids: list[Prompt] = [checked_ids(lm, prompt) for prompt in prompts]
    return job_of(lm, body, Asked(ids, body.max_tokens or DEFAULT_MAX_TOKENS, body.logprobs), tenant, limits)


async def completion_response(
    lm: LM, body: CompletionBody, generation: Generation, identity: Identity
) -> dict[str, Any]:
    """Return the whole response."""
    choices = make_choices(lm.tokenizer, generation.job, generation.prepared)
    async for _ in deltas(generation, choices):
        pass
    return {
        **identity.of("cmpl", "text_completion"),
        "choices": [
            {
                "index": choice.index,
                "text": _echo(lm, body, choice) + choice.text,
                "logprobs": _logprobs(lm, choice.logprobs, 0) if body.logprobs is not None else None,
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ],
        "usage": usage(choices, generation.job),
    }


async def completion_events(
    lm: LM, body: CompletionBody, generation: Generation, identity: Identity
) -> AsyncIterator[bytes]:
    """Yield the chunks of a streamed response."""
    choices = make_choices(lm.tokenizer, generation.job, generation.prepared)
    chunk = partial(_chunk, identity.of("cmpl", "text_completion"))
    offsets = [0] * len(choices)
    if body.echo:
        for choice in choices:
            yield chunk([_choice(choice.index, _echo(lm, body, choice))])
    async for parts in deltas(generation, choices):
        for delta in parts:
            logprobs = None
            if body.logprobs is not None:
                logprobs = _logprobs(lm, delta.logprobs, offsets[delta.index])
                offsets[delta.index] += len(delta.text)
            made = _choice(delta.index, delta.text, logprobs, delta.finish_reason)
            yield chunk([made | traced(lm, body.lookfar, delta)])
    if body.stream_options is not None and body.stream_options.include_usage:
        yield chunk([], usage(choices, generation.job))
    yield DONE


def _chunk(head: dict[str, Any], choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> bytes:
    return event({**head, "choices": choices} | ({"usage": counts} if counts is not None else {}))


def _choice(index: int, text: str, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _echo(lm: LM, body: CompletionBody, choice: Choice) -> str:
    if not body.echo or lm.tokenizer is None:
        return ""
    return str(lm.tokenizer.decode(choice.prompt, skip_special_tokens=True))


def _logprobs(lm: LM, found: list[TokenLogprob], offset: int) -> dict[str, Any]:
    texts = [token_text(lm, one.token) for one in found]
    offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [shown_logprob(one.logprob) for one in found],
        "top_logprobs": [_by_text(lm, one) for one in found],
        "text_offset": offsets,
    }


def _by_text(lm: LM, found: TokenLogprob) -> dict[str, Any]:
    """Return the most likely tokens by text; of those with the same text, such as parts of a character, the first."""
    by_text: dict[str, Any] = {}
    for token, value in found.top:
        by_text.setdefault(token_text(lm, token), shown_logprob(value))
    return by_text
