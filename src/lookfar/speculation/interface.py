"""The interfaces through which the speculator sees requests, batches and verification results."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol, TypeVar

from lookfar.core.arrays import Int32s
from lookfar.drafters.base import BatchDrafter, DraftContext, Drafter, Strategy, wants_hidden
from lookfar.sampling.sampler import Sampler
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.row_budget import Budget, max_draft_rows


class RequestSpeculation:
    """The speculation of one request: its drafters, its row budget, and the draft state that it works with."""

    def __init__(self, strategies: Seq[Strategy], budget: Budget, context: DraftContext, state: DraftState) -> None:
        self.drafters: list[Drafter] = [drafter for strategy in strategies for drafter in strategy.create(context)]
        # Drafters with their (first) sources, as indexes into all names: by class, and those that draft alone.
        self.batch_drafters: dict[type[BatchDrafter], tuple[BatchDrafter, int]] = {}
        self.other_drafters: list[tuple[int, Drafter, int]] = []
        names: list[str] = []
        for index, drafter in enumerate(self.drafters):
            if isinstance(drafter, BatchDrafter) and type(drafter) not in self.batch_drafters:
                self.batch_drafters[type(drafter)] = drafter, len(names)
                names += drafter.source_names
            else:
                if drafter.name not in names:
                    names.append(drafter.name)
                self.other_drafters.append((index, drafter, names.index(drafter.name)))
        self.source_names = tuple(names)
        self.budget = budget
        self.max_rows = max_draft_rows(strategies, budget)
        self.state = state
        self._acceptance: dict[bool, AcceptanceModel] = {}  # with a recycle table or not
        self.uses_window = any(strategy.uses_window for strategy in strategies)
        self.wants_predictions = any(drafter.wants_predictions for drafter in self.drafters)
        self.hidden_drafters = [drafter for _, drafter, _ in self.other_drafters if wants_hidden(drafter)]

    def acceptance(self, recycles: bool, samples: bool) -> AcceptanceModel:
        """Return the model that judges drafts for the request, which samples or not."""
        if recycles not in self._acceptance:
            self._acceptance[recycles] = self.state.acceptance(self.source_names, recycles, samples)
        return self._acceptance[recycles]


class SpeculatedRequest(Protocol):
    """A running request, as the speculator sees it."""

    ids: list[int]  # prompt and output
    num_cached: int  # tokens that are in the KV cache
    source_length: int  # tokens at the start of `ids` that only an encoder reads
    position_offset: int  # of its positions, as the model counts them
    source: Any  # what the decoder of an encoder-decoder model reads of its source
    kv: int  # its handle in the KV cache
    sampler: Sampler
    speculation: RequestSpeculation
    error: BaseException | None  # raised by code of the request: a drafter, a processor, a criterion

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""

    @property
    def first_pending(self) -> int:
        """The index in `ids` of the first token that is not in the KV cache yet."""

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the KV cache yet."""

    @property
    def is_prefilling(self) -> bool:
        """Whether a prompt is being processed, or as many tokens as if it were one."""

    @property
    def prompt_pending(self) -> int:
        """Tokens of the prompt that are not in the KV cache yet."""

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""

    @property
    def steps_left(self) -> float:
        """The steps that it needs at its rate so far, if it is not stopped before."""

    def predicted_from(self, sharing: int) -> int:
        """Return from which position on drafters want the predictions of prompt rows: fewer if requests share them."""

    @property
    def embeds(self) -> Any:
        """What the prompt is fed as, if not as token ids."""

    @property
    def is_finished(self) -> bool: ...

    def count_drafts(self, names: Seq[str], proposed: Seq[int], accepted: Seq[int]) -> None:
        """Count the draft tokens of a step: how many have each of the named sources, and those of the accepted ones."""


class Batch(Protocol):
    """The requests of one step, how many pending tokens each may feed, and the times of the step."""

    @property
    def requests(self) -> Seq[SpeculatedRequest]: ...
    @property
    def chunks(self) -> Seq[int]: ...
    def catch_up(self) -> None:
        """Restrict the step to requests that have tokens to feed again, the same number for each."""

    @property
    def prefills(self) -> bool:
        """Whether the step processes a prompt, or as many tokens as if it were one."""

    @property
    def is_first_pass(self) -> bool:
        """Whether transformers runs the step, which takes no draft tokens."""

    @property
    def others_wait(self) -> bool:
        """Whether other requests wait for a place in the batch."""

    @property
    def started(self) -> float:
        """When the step began (`perf_counter`)."""

    @property
    def host_seconds(self) -> float:
        """The host's time of the step: drafting, planning, verifying and learning; known when it is done."""


class Walk(Protocol):
    """What verification found for one request."""

    nodes: list[int]  # the accepted nodes of its tree
    tokens: list[int]  # the emitted tokens


AnyWalk = TypeVar("AnyWalk", bound=Walk)


class Walks(list[AnyWalk | None]):
    """What verification found for the requests of a step; None for those that prefill or failed."""

    sampling_seconds: float = 0.0  # of the host, in logits processors and sampling
    last: Int32s | None = None  # [2, batch] the last accepted node and token of each, -1 for none
