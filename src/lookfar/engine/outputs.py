"""Engine outputs: immutable records of steps and of finished requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lookfar.core.plan import RequestPlan
from lookfar.engine.request import FinishReason
from lookfar.engine.stats import Stats
from lookfar.kvcache.base import KVState


@dataclass(frozen=True)
class RequestResult:
    """A finished request."""

    token_ids: list[int]  # its output, the stop token included
    finish_reason: FinishReason
    stats: Stats
    scores: list[torch.Tensor]  # of each emitted token, if they were asked for
    logits: list[torch.Tensor]
    exported: KVState | None = None  # the KV of what was fed, if it was asked for


class StepOutput(NamedTuple):
    """The output of one step for one request."""

    handle: int  # of the request
    index: int  # type: ignore[assignment] # its place among the requests of one call
    step: int = 0  # counted from 1
    tokens: tuple[int, ...] = ()  # emitted by this step
    accepted: tuple[int, ...] = ()  # the nodes of the tree that gave the first of those tokens
    fed: RequestPlan | None = None  # the rows of this request
    seconds: float = 0.0  # of the step
    host_seconds: float = 0.0  # of those: this request's share of the host's time
    elapsed: float = 0.0  # seconds since the start of the request's prefill
    reused_tokens: int = 0  # of its prompt, in the KV cache already
    finish_reason: FinishReason | None = None  # set in the last output of a request
    result: RequestResult | None = None  # the same
    error: BaseException | None = None  # the request ended with this error

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def sources(self) -> list[str]:
        """The source of each token; "model" for the last one, the bonus token, and where it is not known."""
        if self.fed is None:
            return ["model"] * len(self.tokens)
        return [self.fed.tree.source(node) for node in self.accepted] + ["model"] if self.tokens else []

    @property
    def num_rows(self) -> int:
        """Rows of the last token, the draft tree and the lookahead window; other prompt rows are not counted."""
        return len(self.fed) - self.fed.last_row if self.fed is not None else 1
