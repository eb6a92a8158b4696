"""Answers as they grow: step outputs → text without stop strings, log-probabilities, counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookfar.detokenizer import detokenizer
from lookfar.engine.outputs import StepOutput
from lookfar.engine.request import FinishReason
from lookfar.engine.stats import Stats, add_up
from lookfar.server.jobs import Job, PreparedRequest
from lookfar.server.logprobs import TokenLogprob
from lookfar.server.stop_strings import StopTextFilter


@dataclass(frozen=True)
class Delta:
    """What one or more steps added to one answer."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None  # set in the last one
    steps: list[tuple[StepOutput, str]] = field(default_factory=list)  # with the text that each added


class Choice:
    """One answer to one prompt."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, index: int, prepared: PreparedRequest, job: Job
    ) -> None:
        self.index = index
        self.prompt = prepared.request.prompt
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stats: Stats | None = None  # when it is finished
        self._recorder = prepared.recorder
        self._detokenizer = detokenizer(tokenizer)
        self._filter = StopTextFilter(job.stop.texts)

    def add(self, output: StepOutput) -> Delta:
        """Take the next output of this answer."""
        tokens = list(output.tokens)
        if output.result is not None:  # without streaming, tokens of a step that was repeated come with the result only
            tokens = output.result.token_ids[len(self.tokens) :]
        logprobs = []
        if self._recorder is not None:
            logprobs = [self._recorder.take(len(self.tokens) + i, token) for i, token in enumerate(tokens)]
        text = self._filter.add(self._detokenizer.add(tokens))
        if output.is_last:
            text += self._filter.add(self._detokenizer.end()) + self._filter.end()
            self.finish_reason = output.finish_reason
            self.stats = output.result.stats if output.result is not None else None
        self.text += text
        self.tokens += tokens
        self.logprobs += logprobs
        return Delta(self.index, text, tokens, logprobs, output.finish_reason, [(output, text)])


def make_choices(tokenizer: PreTrainedTokenizerBase | None, job: Job, prepared: list[PreparedRequest]) -> list[Choice]:
    """Return the empty answers of a job."""
    return [Choice(tokenizer, i, one, job) for i, one in enumerate(prepared)]


def merged(deltas: list[Delta]) -> list[Delta]:
    """Join the deltas of each answer, for a reader that is behind."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [
        Delta(
            index,
            "".join(one.text for one in parts),
            [token for one in parts for token in one.tokens],
            [logprob for one in parts for logprob in one.logprobs],
            parts[-1].finish_reason,
            [step for one in parts for step in one.steps],
        )
        for index, parts in by_index.items()
    ]


def usage(choices: list[Choice], job: Job) -> dict[str, Any]:
    """Return the token counts of a response in OpenAI's form, with those of speculation beside them."""
    total = add_up(choice.stats for choice in choices if choice.stats is not None)
    prompt_tokens = job.prompt_tokens
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    cached = sum(first.stats.reused_tokens for first in choices[:: job.n] if first.stats is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "lookfar": {
            "steps": total.steps,
            "tokens_per_step": round(total.tokens_per_step, 4),
            "rows_per_step": round(total.rows_per_step, 4),
            "drafters": {n: {"proposed": d.proposed, "accepted": d.accepted} for n, d in total.drafters.items()},
        },
    }
