"""A smaller model with the same vocabulary drafts a few tokens, with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lookfar.core.ids import common_prefix
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.errors import ConfigError
from lookfar.models.binding import BoundModel
from lookfar.models.pretrained import load_pretrained
from lookfar.models.self_check import one_slot
from lookfar.retrieval.sources import DraftSources
from lookfar.sampling.sampler import greedy


@dataclass(frozen=True)
class DraftModel(Strategy):
    """A smaller `model` of the same family, loaded or by path or hub name, drafts `length` tokens."""

    name: ClassVar[str] = "draft_model"
    model: Any = None
    length: int = 4

    def __post_init__(self) -> None:
        self._check_at_least(length=1)
        if self.model is None:
            raise ConfigError("draft_model: give the smaller model, as in DraftModel(model=...) or --set model=PATH.")

    def create(self, context: DraftContext) -> list[Drafter]:
        bound: BoundModel = context.sources.shared(
            (DraftModel, self.model), lambda: bind_draft_model(self.model, context.sources)
        )
        return [ModelDrafter(bound, self.length, context.max_length)]

    @property
    def max_rows(self) -> int:
        return self.length


class ModelDrafter:
    """Proposes one draft of `length` tokens, the greedy continuation of the small model."""

    name = DraftModel.name
    wants_predictions = False

    def __init__(self, model: BoundModel, length: int, max_length: int) -> None:
        self.model = model
        self.length = length
        self.cache = one_slot(max_length + length)
        self.cached: list[int] = []  # tokens whose KV is valid

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        # Accepted drafts stay cached; the last token is always fed, for the logits after it.
        same = min(common_prefix(self.cached, ids), len(ids) - 1)
        fresh = list(ids[same:])
        self.cached = list(ids[:same])
        draft: list[int] = []
        for _ in range(min(limit, self.length)):
            plan = StepPlan([RequestPlan(np.array(fresh, dtype=np.int64), len(self.cached))])
            self.cached += fresh
            fresh = [int(greedy(self.model.forward(plan, self.cache))[0, -1])]
            draft += fresh
        return Proposal.of([draft])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass  # `propose` compares the text with what is cached


def bind_draft_model(model: Any, sources: DraftSources) -> BoundModel:
    """Load the smaller model if it is a name, and check it."""
    bound = BoundModel((load_pretrained(model)[0] if isinstance(model, str) else model).eval())
    if bound.vocab_size != sources.vocab_size:
        raise ConfigError(
            f"draft_model: its vocabulary has {bound.vocab_size} tokens and the model's {sources.vocab_size}: "
            "use a smaller model of the same family."
        )
    if bound.support.first_pass:
        raise ConfigError(f"draft_model: {bound.support.model_type} cannot draft: it needs more than the text.")
    if not bound.support.trees:
        raise ConfigError(f"draft_model: {bound.support.model_type} cannot draft: {bound.support.reason}.")
    return bound
