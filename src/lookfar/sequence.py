"""One request on its way: its ids, how much of them is cached, how tokens are chosen, when it stops, what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lookfar.arrays import Ints
from lookfar.choose import pick, scores_after
from lookfar.config import AUTO_ROWS, Budget, Strategy
from lookfar.drafters.base import Drafter
from lookfar.memory import Memory
from lookfar.noise import Draws
from lookfar.processors import fingerprint, history_free, temperature_of
from lookfar.stats import Stats
from lookfar.tree import SequencePlan

if TYPE_CHECKING:
    from transformers import Cache, LogitsProcessorList, StoppingCriteriaList

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """What to decode, and how."""

    prompt: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    strategies: tuple[Strategy, ...] = ()
    budget: Budget = None  # rows a step: as many as pay, a number, or whatever the strategies propose
    remember: bool = True  # may later requests guess from what this one said?
    # As in transformers: processors change the scores of a place given the text before it, criteria say when to stop.
    processors: LogitsProcessorList | None = None
    criteria: StoppingCriteriaList | None = None
    seen: list[int] | None = None  # the prompt as those two see it, if not as it is (padded, say)
    draws: Draws | None = None  # what to sample with; None: always the best token
    device: torch.device | None = None  # where all that happens, if not where the logits are
    keep_scores: bool = False
    keep_logits: bool = False
    # Where the first keys and values come from, if not from the prompt's tokens.
    embeds: torch.Tensor | None = None  # [tokens of the prompt, hidden]
    past: Cache | None = None
    reuse: bool = False  # start from what an earlier request left in a slot
    export: bool = False  # give the keys and values back at the end

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

    scores: list[torch.Tensor] = field(default_factory=list)  # of each emitted token, if they are to be kept
    logits: list[torch.Tensor] = field(default_factory=list)
    exported: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # new keys and values of each layer

    def __post_init__(self) -> None:
        request = self.request
        self.ids = list(request.prompt)
        self._seen = list(request.prompt if request.seen is None else request.seen)
        self.plain = not (request.processors or request.draws or request.keep_scores or request.keep_logits)
        # Can the tokens after all rows of a step be drawn in one call?
        kept = request.keep_scores or request.keep_logits
        self.drawn_at_once = request.draws is not None and not kept and history_free(request.processors)
        self.fingerprint = fingerprint(request.processors) if self.drawn_at_once else None
        self.temperature = temperature_of(request.processors)
        self.drafters = [d for strategy in request.strategies for d in strategy.start(request, self.memory)]
        self.wants_predictions = any(drafter.wants_predictions for drafter in self.drafters)
        self.stats = Stats(prompt_tokens=len(self.ids))
        self._started = perf_counter()

    @property
    def output(self) -> list[int]:
        return self.ids[len(self.request.prompt) :]

    @property
    def emitted(self) -> int:
        return len(self.ids) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        return self.request.length - len(self.ids)

    @property
    def uncached(self) -> int:
        return len(self.ids) - self.cached

    def chain(self, longest: int) -> Ints:
        """The next known tokens to feed; the last of all is the root."""
        return np.array(self.ids[self.cached : self.cached + longest], dtype=np.int64)

    def places(self, rows: SequencePlan) -> Ints:
        """The places of the output that the tokens after a step's root and nodes would take."""
        return self.emitted + np.concatenate([[0], rows.tree.depths])

    def choose(self, tokens: list[int], logits: torch.Tensor) -> int:
        """The token after the text and `tokens`, given the logits there, [vocabulary]."""
        request = self.request
        logits = logits if request.device is None else logits.to(request.device)
        scores = scores_after(request.processors, self._seen + tokens, logits)
        noise = None
        if request.draws is not None:
            noise = request.draws.at(self.emitted + len(tokens), scores.shape[-1])
        if request.keep_scores:
            self.scores.append(scores[0])
        if request.keep_logits:
            self.logits.append(logits.to(torch.float32, copy=True))  # a view would keep all rows of the step
        return int(pick(scores, noise)[0])

    def ends(self, tokens: list[int]) -> FinishReason | None:
        """Does the text end with the last of these new tokens? Asked once for every emitted token, in order."""
        request = self.request
        if request.criteria:
            text = torch.tensor([self._seen + tokens], device=request.device)
            if bool(request.criteria(text, tuple(self.scores) if request.keep_scores else None).any()):
                return "stop"
        if tokens[-1] in request.stop_ids:
            return "stop"
        return "length" if len(tokens) >= self.remaining else None

    def append(self, tokens: list[int], finish_reason: FinishReason | None) -> None:
        """Take a step's tokens."""
        self.ids += tokens
        self._seen += tokens
        self.finish_reason = finish_reason
        if self.request.draws is not None:
            self.request.draws.go_on(self.emitted)
        self.stats.step_sizes.append(len(tokens))
        self.stats.seconds = perf_counter() - self._started


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one sequence."""

    sequence: Sequence
    rows: SequencePlan
    tokens: list[int]
    accepted: list[int]  # the nodes of the tree that gave the first of those tokens
    seconds: float  # of the step

    @property
    def sources(self) -> list[str]:
        """Who guessed each token; "model" for the last one, which nobody had to."""
        return [self.rows.tree.source(node) for node in self.accepted] + ["model"]


OnTokens = Callable[[Sequence, list[int]], None]  # called after a step with a sequence and its new tokens
# Called after a step with a sequence, what it fed, its new tokens and the seconds the step took.
OnStep = Callable[[Sequence, SequencePlan, list[int], float], None]
