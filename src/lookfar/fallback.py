"""What lookfar cannot speed up, transformers decodes: those tokens are right by definition."""

from __future__ import annotations

from collections.abc import Generator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer, EosTokenCriteria, MaxLengthCriteria

from lookfar.choose import odds
from lookfar.loops import own_loop
from lookfar.memory import Memory
from lookfar.noise import Draws
from lookfar.sequence import OnTokens, Request, Sequence


class _Follow(BaseStreamer):
    """Keeps the sequence in step with what `generate` emits."""

    def __init__(self, sequence: Sequence, on_tokens: OnTokens | None) -> None:
        self.sequence = sequence
        self.on_tokens = on_tokens

    def put(self, value: torch.Tensor) -> None:
        for token in value.flatten().tolist():
            sequence = self.sequence
            ended = token in sequence.request.stop_ids
            last = sequence.remaining == 1
            sequence.append([token], "stop" if ended else "length" if last else None)
            sequence.stats.rows += 1
            if self.on_tokens is not None:
                self.on_tokens(sequence, [token])

    def end(self) -> None:
        self.sequence.finish_reason = self.sequence.finish_reason or "stop"  # a criterion ended it


class _Drawn(LogitsProcessor):
    """Makes the best token the one that would be drawn."""

    def __init__(self, draws: Draws, prompt_length: int) -> None:
        self.draws = draws
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return odds(scores, self.draws.at(input_ids.shape[1] - self.prompt_length, scores.shape[-1]))


class _Until(StoppingCriteria):
    def __init__(self, cancelled: Event) -> None:
        self.cancelled = cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.cancelled.is_set(), device=input_ids.device)


def decode_plainly(
    model: PreTrainedModel,
    request: Request,
    index: int,
    memory: Memory,
    on_tokens: OnTokens | None = None,
    cancelled: Event | None = None,
) -> Sequence:
    """Decode one request with the loop of `model.generate`, one token a step."""
    sequence = Sequence(request, index, memory)
    ids = torch.tensor([request.prompt], device=model.device)
    processors = LogitsProcessorList(request.processors or ())
    if request.draws is not None:
        processors.append(_Drawn(request.draws, len(request.prompt)))
    criteria = StoppingCriteriaList([MaxLengthCriteria(request.length), *(request.criteria or ())])
    if request.stop_ids:
        criteria.append(EosTokenCriteria(sorted(request.stop_ids)))
    if cancelled is not None:
        criteria.append(_Until(cancelled))

    def loop(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
        """transformers' own loop, after its own preparations, but with the rules of this request."""
        ours = {"logits_processor": processors, "stopping_criteria": criteria, "streamer": _Follow(sequence, on_tokens)}
        return own_loop(model)(model, input_ids, **(prepared | ours))

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=sorted(request.stop_ids) or None,
        pad_token_id=min(request.stop_ids, default=0),
        custom_generate=loop,
    )
    return sequence


def stream_plainly(
    model: PreTrainedModel, request: Request, index: int, memory: Memory
) -> Generator[tuple[Sequence, list[int]], None, None]:
    """The same, token by token. Whoever stops reading stops the decoding."""
    cancelled, told = Event(), SimpleQueue[Any]()

    def work() -> None:
        try:
            decode_plainly(model, request, index, memory, lambda *news: told.put(news), cancelled)
            told.put(None)
        except BaseException as error:
            told.put(error)

    worker = Thread(target=work, daemon=True)
    worker.start()
    try:
        news: Any = told.get()
        while news is not None:
            if isinstance(news, BaseException):
                raise news
            yield news
            news = told.get()
    finally:
        cancelled.set()
        worker.join()
