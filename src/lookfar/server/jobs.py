"""Jobs: what one HTTP request asks the engine for, without the words of any API."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList

from lookfar.engine.request import Request
from lookfar.lm import LM
from lookfar.server.keys import ANYONE, Tenant
from lookfar.server.logprobs import LogprobRecorder
from lookfar.server.stop_strings import StopTextCriterion
from lookfar.speculation.draft_state import DraftState

DEFAULT_MAX_TOKENS = 4096  # where a request does not say, and its context has room


Prompt = list[int] | Mapping[str, Any]  # token ids, or the outputs of a processor for one conversation


def prompt_length(prompt: Prompt) -> int:
    """Return the tokens of a prompt."""
    return len(prompt["input_ids"][0]) if isinstance(prompt, Mapping) else len(prompt)


@dataclass(frozen=True)
class StopRules:
    """What ends an answer beside its length."""

    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()  # beside the model's own
    ignore_eos: bool = False  # leave the model's own out


@dataclass(frozen=True)
class Job:
    """Prompts and how to answer them; `n` answers to each prompt."""

    prompts: list[Prompt]
    options: Mapping[str, Any] = field(default_factory=dict)  # of `LM.requests`
    n: int = 1
    seed: int | None = None  # answer i to a prompt is sampled with seed + i; None: a random one
    stop: StopRules = field(default_factory=StopRules)
    top_logprobs: int | None = None
    remember: bool = True
    priority: int = 0  # lower is earlier
    stream: bool = False  # whether every step is wanted as it comes
    tenant: Tenant = ANYONE
    constraint_field: str | None = None  # of the body, for errors
    client: str = ""  # those with different ones take turns; "": the tenant

    @property
    def answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(prompt_length, self.prompts))


@dataclass(frozen=True)
class PreparedRequest:
    """A request for the engine, and where its log-probabilities are recorded."""

    request: Request
    recorder: LogprobRecorder | None = None


def prepare(lm: LM, job: Job, draft_state: DraftState) -> list[PreparedRequest]:
    """Return the requests of a job: all answers to the first prompt, then those to the second, and so on.

    Takes about a millisecond for each, more with a grammar: not for the event loop.
    """
    return [_prepare_one(lm, job, prompt, i, draft_state) for prompt in job.prompts for i in range(job.n)]


def _prepare_one(lm: LM, job: Job, prompt: Prompt, choice: int, draft_state: DraftState) -> PreparedRequest:
    options = dict(job.options)
    if options.get("max_new_tokens") is None:
        options["max_new_tokens"] = remaining_context(lm, prompt_length(prompt))
    seed = secrets.randbits(63) if job.seed is None else job.seed + choice
    (request,), _ = lm.requests(prompt, seed=seed, reuse=True, **options)
    sampling, criteria, recorder = request.sampling, request.criteria, None
    length = len(request.prompt) - request.source_length  # as processors and criteria see it
    if job.stop.texts:
        assert lm.tokenizer is not None
        stop = StopTextCriterion(lm.tokenizer, job.stop.texts, length)
        criteria = StoppingCriteriaList([*(criteria or ()), stop])
    stop_ids = job.stop.ids | (frozenset() if job.stop.ignore_eos else request.stop_ids)
    if job.top_logprobs is not None:
        recorder = LogprobRecorder(length, job.top_logprobs)
        sampling = replace(sampling, processors=LogitsProcessorList([recorder, *(sampling.processors or ())]))
    remember = request.remember and job.remember and job.tenant.remember
    kv = replace(request.kv, namespace=job.tenant.namespace)
    changed = replace(request, stop_ids=stop_ids, criteria=criteria, sampling=sampling, kv=kv)
    return PreparedRequest(replace(changed, remember=remember, draft_state=draft_state), recorder)


def remaining_context(lm: LM, prompt_length: int) -> int:
    """Return the most new tokens that a prompt leaves room for, up to `DEFAULT_MAX_TOKENS`; at least 1."""
    limit = lm.engine.max_length
    return DEFAULT_MAX_TOKENS if limit is None else max(1, min(DEFAULT_MAX_TOKENS, limit - prompt_length))
