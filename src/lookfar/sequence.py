"""One request on its way: its ids, how much of them is cached, when it stops, what it cost. Token ids only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from lookfar.arrays import Ints
from lookfar.config import AUTO_ROWS, Budget, Strategy
from lookfar.drafters.base import Drafter
from lookfar.memory import Memory
from lookfar.stats import Stats
from lookfar.tree import SequencePlan

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """What to decode. `processors` change the logits of a place given the ids before it, as in transformers."""

    prompt: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    strategies: tuple[Strategy, ...] = ()
    processors: LogitsProcessorList | None = None
    budget: Budget = None  # rows a step: as many as pay, a number, or whatever the strategies propose
    remember: bool = True  # may later requests guess from what this one said?

    @property
    def length(self) -> int:
        """The most tokens the request can come to."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def extra_rows(self) -> int:
        """The most rows its drafters add to one step."""
        if not self.strategies:
            return 0
        if self.budget == "auto":
            return AUTO_ROWS - 1
        if self.budget is not None:
            return 2 * self.budget  # in a batch, confident sequences take rows that others leave
        return sum(strategy.max_rows for strategy in self.strategies)


@dataclass
class Sequence:
    """A request that has a slot."""

    request: Request
    index: int  # its place among the requests of one call
    memory: Memory
    ids: list[int] = field(init=False)
    cached: int = 0
    finish_reason: FinishReason | None = None
    drafters: list[Drafter] = field(init=False)
    stats: Stats = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        request = self.request
        self.drafters = [d for strategy in request.strategies for d in strategy.start(request, self.memory)]
        self.stats = Stats(prompt_tokens=len(self.ids))
        self._started = perf_counter()

    @property
    def output(self) -> list[int]:
        return self.ids[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.request.length - len(self.ids)

    @property
    def wants_predictions(self) -> bool:
        return any(drafter.wants_predictions for drafter in self.drafters)

    @property
    def uncached(self) -> int:
        return len(self.ids) - self.cached

    def chain(self, longest: int) -> Ints:
        """The next known tokens to feed; the last of all is the root."""
        return np.array(self.ids[self.cached : self.cached + longest], dtype=np.int64)

    def append(self, tokens: list[int]) -> list[int]:
        """Take a step's tokens up to the first stop; returns those that were taken."""
        taken = tokens[: self.remaining]
        for i, token in enumerate(taken):
            if token in self.request.stop_ids:
                taken, self.finish_reason = taken[: i + 1], "stop"
                break
        self.ids += taken
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = "length"
        self.stats.step_sizes.append(len(taken))
        self.stats.seconds = perf_counter() - self._started
        return taken


OnTokens = Callable[[Sequence, list[int]], None]  # called after a step with a sequence and its new tokens
# Called after a step with a sequence, what it fed, its new tokens and the seconds the step took.
OnStep = Callable[[Sequence, SequencePlan, list[int], float], None]
