"""The fallback: requests that cannot be decoded exactly with speculation are decoded by transformers itself."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from queue import Empty, Queue
from threading import Event, Thread, current_thread
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer, EosTokenCriteria, MaxLengthCriteria

from lookfar.engine.outputs import RequestResult, StepOutput
from lookfar.engine.request import FinishReason, Request
from lookfar.engine.stats import Stats
from lookfar.errors import RequestError
from lookfar.models.stock_loop import stock_loop
from lookfar.sampling.noise import RandomStream
from lookfar.sampling.sampler import noisy_probabilities

QUEUE_LIMIT = 64  # outputs that wait for their reader; then decoding waits

OnOutput = Callable[[StepOutput], None]
_streams: WeakSet[FallbackStream] = WeakSet()


class _Recorder(BaseStreamer):
    """Turns the tokens that `generate` emits into step outputs."""

    def __init__(self, request: Request, index: int, on_output: OnOutput) -> None:
        self.request = request
        self.index = index
        self.on_output = on_output
        self.tokens: list[int] = []
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self.started = perf_counter()
        self.finish_reason: FinishReason | None = None

    def put(self, value: torch.Tensor) -> None:
        for token in value.flatten().tolist():
            self.tokens.append(token)
            if token in self.request.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.finish_reason = "length"
            seconds = perf_counter() - self.started
            step_seconds, self.stats.seconds = seconds - self.stats.seconds, seconds
            self.stats.step_sizes.append(1)
            self.stats.rows += 1
            self._emit((token,), step_seconds)

    def end(self) -> None:
        if self.finish_reason is None:  # a criterion ended it, which is known after the token only
            self.finish_reason = "stop"
            self._emit((), 0.0)

    def _emit(self, tokens: tuple[int, ...], seconds: float) -> None:
        reason = self.finish_reason
        result = self.result() if reason is not None else None
        output = StepOutput(-1, self.index, self.stats.steps, tokens, finish_reason=reason, result=result)
        self.on_output(output._replace(seconds=seconds, elapsed=self.stats.seconds))

    def result(self) -> RequestResult:
        assert self.finish_reason is not None
        return RequestResult(self.tokens, self.finish_reason, self.stats, [], [])


class _NoiseProcessor(LogitsProcessor):
    """Makes the most likely token the one that would be sampled."""

    def __init__(self, random: RandomStream, prompt_length: int) -> None:
        self.random = random
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return noisy_probabilities(scores, self.random.at(input_ids.shape[1] - self.prompt_length, scores.shape[-1]))


class _Cancelled(StoppingCriteria):
    def __init__(self, cancelled: Event) -> None:
        self.cancelled = cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.cancelled.is_set(), device=input_ids.device)


def decode_with_transformers(
    model: PreTrainedModel,
    request: Request,
    index: int = 0,
    on_output: OnOutput = lambda _: None,
    cancelled: Event | None = None,
) -> RequestResult:
    """Decode one request with the loop of `model.generate`, one token a step."""
    given, length = _inputs(model, request), len(request.prompt) - request.source_length
    processors = LogitsProcessorList(request.sampling.processors or ())
    if request.sampling.random is not None:
        request.sampling.random.noise.start()
        processors.append(_NoiseProcessor(request.sampling.random, length))
    criteria = StoppingCriteriaList([MaxLengthCriteria(request.decoded_length), *(request.criteria or ())])
    if request.stop_ids:
        criteria.append(EosTokenCriteria(sorted(request.stop_ids)))
    if cancelled is not None:
        criteria.append(_Cancelled(cancelled))
    recorder = _Recorder(request, index, on_output)

    def loop(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
        """Run transformers' own loop, after its own preparations, with the rules of this request."""
        rules = {"logits_processor": processors, "stopping_criteria": criteria, "streamer": recorder}
        return stock_loop(model)(model, input_ids, **(prepared | rules))

    model.generate(
        **given,
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=sorted(request.stop_ids) or None,
        pad_token_id=min(request.stop_ids, default=0),
        custom_generate=loop,
    )
    return recorder.result()


def _inputs(model: PreTrainedModel, request: Request) -> dict[str, Any]:
    """Return what `generate` is called with for a request."""
    first = request.kv.first
    if first is None:
        ids = torch.tensor([request.prompt], device=model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if first.call.given is None or len(first.call.pads) > 1:
        raise RequestError("This model decodes one prompt with images or audio at a time here: give them one by one.")
    return dict(first.call.given)


class FallbackStream:
    """Decodes requests with transformers in a thread of its own, one after the other, as fast as they are read."""

    def __init__(self, model: PreTrainedModel, requests: dict[int, Request]) -> None:
        self.is_cancelled = False
        self._model = model
        self._requests = requests  # by index
        self._cancelled = Event()
        self._queue: Queue[StepOutput | BaseException | None] = Queue(QUEUE_LIMIT)
        kind = model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._autocast = torch.autocast(kind, dtype) if dtype is not None else nullcontext()  # of the caller's thread
        self._worker = Thread(target=self._work, daemon=True)
        self._worker.start()
        _streams.add(self)

    def __iter__(self) -> Iterator[StepOutput]:
        while (output := self.next_output()) is not None:
            yield output

    def next_output(self) -> StepOutput | None:
        """Wait for the next output; None if there are no more, or the stream was cancelled."""
        output = self._queue.get()
        if self.is_cancelled or output is None:
            self._queue.put(None)
            return None
        if isinstance(output, BaseException):
            raise output
        return output

    def cancel(self, wait: bool = True) -> None:
        """Stop decoding after the present token; from any thread, any number of times."""
        self.is_cancelled = True
        self._cancelled.set()
        with suppress(Empty):
            while True:
                self._queue.get_nowait()  # a worker that waits for room goes on
        self._queue.put(None)
        if wait and self._worker is not current_thread():
            self._worker.join()

    def _work(self) -> None:
        try:
            with self._autocast:
                for index, request in self._requests.items():
                    if not self._cancelled.is_set():
                        decode_with_transformers(self._model, request, index, self._put, self._cancelled)
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: StepOutput | BaseException | None) -> None:
        if not self._cancelled.is_set():
            self._queue.put(item)


@atexit.register
def _cancel_all() -> None:
    """End all threads before the interpreter does: a thread inside torch would bring it down."""
    for stream in list(_streams):
        stream.cancel()
