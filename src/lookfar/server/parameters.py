"""The fields of a request body → a job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lookfar.drafters.registry import BUILTIN, RESERVED
from lookfar.lm import LM
from lookfar.server.config import Limits
from lookfar.server.errors import ApiError, as_api_error, invalid
from lookfar.server.jobs import Job, Prompt, StopRules, prompt_length
from lookfar.server.keys import Tenant
from lookfar.server.limits import check_count, checked_regex, checked_schema, checked_stops
from lookfar.server.schemas import GenerationBody, LookfarOptions, ResponseFormat, StructuredOutputs

GREEDY_BELOW = 1e-3  # temperatures below this are taken as 0
# A draft model is loaded from a path, which clients must not choose.
STRATEGIES = frozenset({*RESERVED, *BUILTIN} - {"draft_model"})
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class Asked:
    """What an endpoint knows beside the common fields of a body."""

    prompts: list[Prompt]
    max_tokens: int | None
    top_logprobs: int | None = None
    constraint: dict[str, Any] | None = None  # of its own, such as that of a required tool call


def job_of(lm: LM, body: GenerationBody, asked: Asked, tenant: Tenant, limits: Limits) -> Job:
    """Return the job of a request, checked against the limits."""
    n = body.n or 1
    check_count("n", n, limits.n)
    if n * len(asked.prompts) > limits.answers:
        raise invalid(
            "n", f"One request has at most {limits.answers} answers, not {n} for {len(asked.prompts)} prompts."
        )
    if asked.top_logprobs is not None:
        check_count("logprobs", asked.top_logprobs, limits.logprobs)
    options = sampling_options(body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p)
    options |= {name: getattr(body, name) for name in PENALTIES if getattr(body, name) is not None}
    if body.min_tokens:
        options["min_new_tokens"] = body.min_tokens
    if body.logit_bias:
        options["sequence_bias"] = _biases(lm, body.logit_bias, limits)
    options |= asked.constraint or constraint_of(body.response_format, body.structured_outputs, limits)
    options |= speculation_options(body.lookfar, limits)
    options["max_new_tokens"] = checked_length(lm, asked.prompts, asked.max_tokens)
    stops = checked_stops(body.stop, limits)
    if stops and lm.tokenizer is None:
        raise invalid("stop", "stop needs a tokenizer, which this model does not have.")
    return Job(
        asked.prompts,
        options,
        n,
        body.seed,
        StopRules(stops, _stop_ids(lm, body.stop_token_ids), body.ignore_eos),
        asked.top_logprobs,
        remember=body.lookfar is None or body.lookfar.remember,
        priority=body.priority,
        stream=bool(body.stream),
        tenant=tenant,
        constraint_field=_constraint_field(body, asked),
    )


def _constraint_field(body: GenerationBody, asked: Asked) -> str:
    if asked.constraint:
        return "tools"
    return "structured_outputs" if body.structured_outputs is not None else "response_format"


def sampling_options(temperature: float | None, **cuts: float | None) -> dict[str, Any]:
    """Return the options for a temperature and `top_p`, `top_k` and `min_p`; greedy if none is given.

    OpenAI has no top_k and that of vLLM is off by default, but that of transformers is 50.
    """
    given = {name: value for name, value in cuts.items() if value is not None}
    if (temperature is None and not given) or (temperature is not None and temperature < GREEDY_BELOW):
        return {"do_sample": False}
    top_k = max(int(given.get("top_k", 0)), 0)
    return given | {"do_sample": True, "temperature": 1.0 if temperature is None else temperature, "top_k": top_k}


def checked_length(lm: LM, prompts: list[Prompt], max_tokens: int | None) -> int | None:
    """Refuse prompts that leave no room for an answer, or not for the tokens that are asked for."""
    limit, longest = lm.engine.max_length, max(map(prompt_length, prompts))
    if limit is not None and longest + (max_tokens or 1) > limit:
        asked = f" and max_tokens is {max_tokens}" if max_tokens else ""
        raise ApiError(
            400,
            f"The prompt has {longest} tokens{asked}: together at most {limit} fit this model.",
            "max_tokens" if max_tokens and longest < limit else "prompt",
            "context_length_exceeded",
        )
    return max_tokens


def _stop_ids(lm: LM, given: list[int] | None) -> frozenset[int]:
    vocab_size = lm.engine.runner.model.vocab_size
    if any(token >= vocab_size for token in given or ()):
        raise invalid("stop_token_ids", f"Token ids go from 0 to {vocab_size - 1}.")
    return frozenset(given or ())


def _biases(lm: LM, biases: dict[str, float], limits: Limits) -> dict[tuple[int], float]:
    check_count("logit_bias", len(biases), limits.logit_biases)
    vocab_size = lm.engine.runner.model.vocab_size
    found = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            raise invalid("logit_bias", f"logit_bias takes token ids from 0 to {vocab_size - 1}, not {token[:20]!r}.")
        found[(int(token),)] = float(bias)
    return found


def speculation_options(options: LookfarOptions | None, limits: Limits) -> dict[str, Any]:
    """Return the strategy and the budget of a request."""
    if options is None:
        return {}
    if options.strategy is not None and not STRATEGIES.issuperset(options.strategy.split("+")):
        names = ", ".join(sorted(STRATEGIES))
        raise invalid("lookfar.strategy", f"The strategy is one of {names}, or several joined by +.")
    if isinstance(options.budget, int):
        check_count("lookfar.budget", options.budget, limits.budget)
    return {"strategy": options.strategy, "budget": options.budget}


def constraint_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, limits: Limits
) -> dict[str, Any]:
    """Return the option of `LM.requests` that constrains the answer."""
    if structured is not None:
        if response_format is not None and response_format.type != "text":
            raise invalid("structured_outputs", "Give response_format or structured_outputs, not both.")
        return _structured(structured, limits)
    if response_format is None or response_format.type == "text":
        return {}
    if response_format.type == "json_object":
        return {"json_schema": checked_schema("response_format", {"type": "object"}, limits)}
    if response_format.json_schema is None or response_format.json_schema.json_schema is None:
        raise invalid("response_format.json_schema", "response_format of type json_schema needs json_schema.schema.")
    return {"json_schema": checked_schema("response_format", response_format.json_schema.json_schema, limits)}


def _structured(structured: StructuredOutputs, limits: Limits) -> dict[str, Any]:
    param = "structured_outputs"
    given = [name for name in type(structured).model_fields if getattr(structured, name) is not None]
    if len(given) != 1:
        raise invalid(param, "structured_outputs takes one of json, regex, choice and grammar.")
    if structured.json_schema is not None:
        return {"json_schema": checked_schema(param, structured.json_schema, limits)}
    if structured.regex is not None:
        return {"regex": checked_regex(param, structured.regex, limits)}
    if structured.choice is not None:
        return {"grammar": _choice_grammar(structured.choice, limits)}
    assert structured.grammar is not None
    if len(structured.grammar) > limits.schema_bytes:
        raise invalid(param, f"A grammar has at most {limits.schema_bytes} bytes.")
    return {"grammar": structured.grammar}


def _choice_grammar(choices: list[str], limits: Limits) -> str:
    texts = [json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\x7f") for choice in choices]
    grammar = "start: " + " | ".join(texts)
    if len(grammar) > limits.schema_bytes:
        raise invalid("structured_outputs", f"All choices have at most {limits.schema_bytes} bytes.")
    return grammar


def checked_ids(lm: LM, text: str | list[int], param: str = "prompt") -> list[int]:
    """Return the token ids of a prompt."""
    try:
        return lm.encode(text)
    except Exception as error:
        failed = as_api_error(error)
        raise ApiError(failed.status, failed.message, param) from error
