"""The answers of a call: completions, and streams of one chunk for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from lookfar.detokenizer import detokenizer
from lookfar.engine.outputs import RequestResult, StepOutput
from lookfar.engine.request import FinishReason, Request
from lookfar.engine.stats import Stats
from lookfar.sampling.noise import SamplingNoise


@dataclass(frozen=True)
class Chunk:
    """The text and tokens that one step added to one answer."""

    text: str  # complete characters only; the pieces add up to the text of the completion
    token_ids: list[int]
    sources: list[str]  # the source of each token; "model" for the bonus token
    step: int  # counted from 1
    index: int  # of the prompt in a list of prompts
    finish_reason: FinishReason | None  # set in the last chunk of an answer
    stats: Stats  # so far


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    text: str  # without special tokens; empty when there is no tokenizer
    token_ids: list[int]  # as `model.generate` returns them, the stop token included
    finish_reason: FinishReason  # "stop" at a stop token, stop string or criterion, "length" at max_new_tokens
    stats: Stats

    @classmethod
    def of(cls, result: RequestResult, tokenizer: PreTrainedTokenizerBase | None) -> Completion:
        """Return the answer that a request ended with."""
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True) if tokenizer is not None else ""
        return cls(str(text), result.token_ids, result.finish_reason, result.stats)


class OutputSource(Protocol):
    """Where the outputs of some requests come from: the engine or the fallback."""

    def next_output(self) -> StepOutput | None:
        """Wait for the next output; None if there are no more."""

    def cancel(self, wait: bool = True) -> None:
        """Cancel what is not finished, from any thread."""


class Stream(Iterator[Chunk]):
    """An iterator of chunks. Decoding starts with the first one.

    Closing the stream cancels its requests: `close()` from any thread, the end of a `with` block, or dropping the
    stream. Chunks of several prompts come mixed, with the `index` of their prompt.
    """

    def __init__(
        self,
        requests: Seq[Request],
        sources: Seq[Callable[[], OutputSource]],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._sources = list(sources)  # each is started when the one before it has ended
        self._source: OutputSource | None = None
        self._texts = [detokenizer(tokenizer) for _ in requests]
        self._stats = [Stats(prompt_tokens=len(request.prompt)) for request in requests]
        self._noise = noise_of(requests)
        self._started = self._closed = False
        self._lock = RLock()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        try:
            output = self._next_output()
        except BaseException:
            self.close()
            raise
        if output is None:
            self.close()
            raise StopIteration
        return self._chunk(output)

    def _next_output(self) -> StepOutput | None:
        while True:
            with self._lock:
                if self._closed:
                    return None
                if self._source is None:
                    if not self._sources:
                        return None
                    self._source = self._sources.pop(0)()
                    self._started = True
                source = self._source
            output = source.next_output()
            if output is not None:
                return output
            self._source = None

    def _chunk(self, output: StepOutput) -> Chunk:
        tokens, index = list(output.tokens), output.index
        text, stats = self._texts[index].add(tokens), self._stats[index]
        if tokens:
            stats.step_sizes.append(len(tokens))
            stats.rows += output.num_rows
            stats.host_seconds += output.host_seconds
            stats.seconds, stats.reused_tokens = output.elapsed, output.reused_tokens
            if output.fed is not None:
                stats.count_drafts(output.fed.tree, output.accepted)
        if output.is_last:
            text += self._texts[index].end()
        now = output.result.stats if output.result is not None else stats.copy()
        return Chunk(text, tokens, output.sources, output.step, index, output.finish_reason, now)

    def close(self) -> None:
        """Cancel the unfinished requests; from any thread, any number of times."""
        self._close(wait=True)

    def _close(self, wait: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            source = self._source
        if source is not None:
            source.cancel(wait)
        if self._noise is not None and self._started:
            self._noise.finish(max(stats.tokens for stats in self._stats))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if "_closed" in vars(self):
            self._close(wait=False)  # the collector may run anywhere, also in a thread that the driver waits for


def noise_of(requests: Seq[Request]) -> SamplingNoise | None:
    """Return the sampling noise that the requests of a call share; None if they do not sample."""
    random = requests[0].sampling.random
    return random.noise if random is not None else None
