"""Requests, and their state while they are decoded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch
from transformers import Cache, StoppingCriteriaList

from lookfar.drafters.base import DraftContext, Strategy
from lookfar.engine.stats import Stats
from lookfar.kvcache.base import KVState
from lookfar.models.binding import BoundModel
from lookfar.models.first_forward import FirstForward
from lookfar.models.source import SourceKV
from lookfar.sampling.sampler import Sampler, SamplingParams
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.interface import RequestSpeculation
from lookfar.speculation.row_budget import Budget, max_draft_rows

FinishReason = Literal["stop", "length"]
ROOM = 4096  # KV positions for the answer that are reserved at once; the KV cache grows with longer answers
MAX_REPLAY = 128  # tokens that are fed again together with drafts; more are processed like a prompt
PREDICTED_PROMPT = 128  # prompt rows whose predictions drafters get, or as many as the request may emit


@dataclass(frozen=True)
class FirstPass:
    """A row of a first forward pass that transformers runs: a prompt with images, or the source of an encoder."""

    call: FirstForward
    row: int
    source_length: int = 0  # tokens at the start of the prompt that only the encoder reads


@dataclass(frozen=True)
class KVOptions:
    """The initial KV of a request (a first pass, embeddings, a given cache, reuse), and whether its KV is returned."""

    embeds: torch.Tensor | None = None  # [tokens of the prompt, hidden] what the prompt is fed as
    past: Cache | None = None  # a transformers cache that holds the beginning of the prompt
    first: FirstPass | None = None  # the pass that computes the KV of the prompt
    reuse: bool = False  # start from what an earlier request left in the KV cache
    namespace: str = ""  # whose prefixes it shares, where there is a prefix cache
    export: bool = False  # return the KV at the end


@dataclass(frozen=True)
class Request:
    """A prompt with its limits, strategies, sampling and KV options."""

    prompt: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    strategies: tuple[Strategy, ...] = ()
    budget: Budget = None
    remember: bool = True  # whether later requests may draft from this one
    criteria: StoppingCriteriaList | None = None  # asked after every token
    sampling: SamplingParams = field(default_factory=SamplingParams)
    kv: KVOptions = field(default_factory=KVOptions)
    draft_state: DraftState | None = None  # None: the engine's

    @property
    def max_length(self) -> int:
        """The most tokens that the text can come to."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def source_length(self) -> int:
        """Tokens at the start of the prompt that have no KV of their own: the source of an encoder."""
        return self.kv.first.source_length if self.kv.first is not None else 0

    @property
    def decoded_length(self) -> int:
        """The most tokens that the decoder sees."""
        return self.max_length - self.source_length

    @property
    def max_draft_rows(self) -> int:
        """The most rows that its drafters add to one step."""
        return max_draft_rows(self.strategies, self.budget)

    @property
    def max_positions(self) -> int:
        """The most KV positions that it needs."""
        return self.decoded_length + self.max_draft_rows


class RequestState:
    """A request from its submission to its end. Only the engine reads and changes it."""

    def __init__(
        self, request: Request, handle: int, index: int, state: DraftState, model: BoundModel | None = None
    ) -> None:
        self.request = request
        self.handle = handle
        self.index = index  # its place among the requests of one call
        self.ids = list(request.prompt)
        self.num_cached = 0
        self.replays = False  # its pending tokens were verified before: a recurrent state was put back
        self.kv = -1  # its handle in the KV cache
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.num_delivered = 0  # emitted tokens that left the engine
        self.every_step = True  # whether the output of every step is wanted, or only the last one
        self.retried = False  # it was in a step that failed, and runs alone since
        self.swapped: KVState | None = None  # its KV while it waits for its reader
        self.source: SourceKV | None = None  # what the decoder reads of its source
        self.source_length = request.source_length
        self.position_offset = 0  # of its positions, as the model counts them
        self.stats = Stats(prompt_tokens=len(self.ids))
        self.sampler = Sampler(request.sampling, request.prompt, keep_text=bool(request.criteria))
        # On an accelerator one call for all rows is faster than several calls that each wait for the device. On a CPU
        # it is the other way round: most rows are never reached, and sorting a vocabulary takes milliseconds.
        self.samples_by_row = self.sampler.is_row_parallel and self.sampler.device.type != "cpu"
        # Verification has to run code of the request for every token: criteria, or processors that see the text.
        self.has_rules = bool(request.criteria) or not (self.sampler.is_argmax or self.samples_by_row)
        # Code that is not known to be light: it may compute with as many threads as torch has.
        self.runs_own_code = bool(request.criteria) or not (self.sampler.is_argmax or self.sampler.is_row_parallel)
        self._has_sampler = self.has_rules or self.sampler.random is not None
        self.stop_ids = request.stop_ids
        self.max_length = request.max_length
        self.exported: KVState | None = None
        context = DraftContext(request.prompt, request.max_length, state.sources, request.remember, model)
        self.speculation = RequestSpeculation(request.strategies, request.budget, context, state)
        self._started: float | None = None

    @property
    def output(self) -> list[int]:
        return self.ids[len(self.request.prompt) :]

    def deliver(self) -> tuple[int, ...]:
        """Return the emitted tokens that have not left the engine yet."""
        new = self.ids[len(self.request.prompt) + self.num_delivered :]
        self.num_delivered += len(new)
        return tuple(new)

    @property
    def num_pending(self) -> int:
        return len(self.ids) - self.source_length - self.num_cached

    @property
    def first_pending(self) -> int:
        """The index of the first token that is not in the KV cache yet."""
        return self.source_length + self.num_cached

    @property
    def needs_first_pass(self) -> bool:
        """Whether transformers has to run the prompt, before anything else."""
        return self.request.kv.first is not None and not self.num_cached

    @property
    def is_prefilling(self) -> bool:
        """Whether a prompt is being processed, or as many tokens as if it were one."""
        num_cached = self.num_cached
        pending = len(self.ids) - self.source_length - num_cached  # asked in every step for every request
        return pending > (MAX_REPLAY if self.replays else 1) or num_cached == 0

    @property
    def prompt_pending(self) -> int:
        """Tokens of the prompt that are not in the KV cache yet."""
        return max(len(self.request.prompt) - self.num_cached, 0)

    @property
    def num_positions(self) -> int:
        """The KV positions that the next step may need."""
        return len(self.ids) - self.source_length + self.speculation.max_rows

    @property
    def reserved_positions(self) -> int:
        """The KV positions to reserve: all that it may need, or room for a long answer."""
        return min(self.request.max_positions, self.num_positions + max(ROOM, len(self.ids)))

    @property
    def remaining(self) -> int:
        return self.max_length - len(self.ids)

    @property
    def steps_left(self) -> float:
        num_emitted = len(self.ids) - len(self.request.prompt)
        return self.remaining * max(len(self.stats.step_sizes), 1) / max(num_emitted, 1)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def predicted_from(self, sharing: int) -> int:
        if self.request.kv.first is not None:
            return self.max_length  # a first pass has the logits of the last token only
        return len(self.request.prompt) - max(PREDICTED_PROMPT, self.request.max_new_tokens) // sharing

    @property
    def embeds(self) -> Any:
        return self.request.kv.embeds

    def start(self) -> None:
        """Start the clock, when the request first gets its place in the KV cache."""
        if self._started is None:
            self._started = perf_counter()

    def accept(self, tokens: list[int], finish_reason: FinishReason | None, now: float) -> None:
        """Append the tokens of a step."""
        self.ids += tokens
        if self._has_sampler:
            self.sampler.append(tokens)
        if finish_reason is not None:
            self.finish_reason = finish_reason
            self.sampler.release()
        self.stats.step_sizes.append(len(tokens))
        assert self._started is not None
        self.stats.seconds = now - self._started

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        self.error = error
        self.sampler.release()

    def count_drafts(self, names: Seq[str], proposed: Seq[int], accepted: Seq[int]) -> None:
        """Count the draft tokens of a step by source."""
        self.stats.add_drafts(names, proposed, accepted)
