"""Facts about the requests of a step that hold as long as the same requests share their steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property

import numpy as np

from lookfar.core.decode_plan import DecodingRequests
from lookfar.core.plan import RequestPlan
from lookfar.speculation.cost_curve import step_kind
from lookfar.speculation.interface import SpeculatedRequest

LAST = np.zeros(1, np.int64)  # stands for a last token


class BatchFacts:
    """Answers the questions that every step asks about its requests, without asking each request again."""

    def __init__(self, requests: Seq[SpeculatedRequest]) -> None:
        self.requests = list(requests)
        self.handles = [request.kv for request in requests]
        speculation = [request.speculation for request in requests]
        self.samples = any(request.sampler.random is not None for request in requests)
        self.kind = step_kind(len(requests), self.samples)
        self.is_automatic = all(own.budget == "auto" for own in speculation)
        self.wants_predictions = any(own.wants_predictions for own in speculation)
        self.wants_hidden = any(own.hidden_drafters for own in speculation)
        self._past_prompts = False
        self.drafting = [place for place, own in enumerate(speculation) if own.drafters]

    def are_of(self, requests: Seq[SpeculatedRequest]) -> bool:
        """Whether they hold for the requests of a step. A request that was paused has another handle."""
        return self.requests == requests and self.handles == [request.kv for request in requests]

    def has_prompts(self) -> bool:
        """Whether a request still has tokens of its prompt to feed."""
        self._past_prompts = self._past_prompts or not any(request.prompt_pending for request in self.requests)
        return not self._past_prompts

    @cached_property
    def decoding(self) -> DecodingRequests:
        """What the plans of these requests have in common when all of them decode."""
        return DecodingRequests([_plan_like(request) for request in self.requests])


def _plan_like(request: SpeculatedRequest) -> RequestPlan:
    return RequestPlan(
        LAST,
        request.num_cached,
        request.kv,
        predict=int(request.speculation.wants_predictions),
        embeds=request.embeds,
        sampler=request.sampler if request.sampler.random is not None else None,
        position_offset=request.position_offset,
        source=request.source,
    )
