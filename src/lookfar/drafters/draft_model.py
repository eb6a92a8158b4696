"""A smaller model with the same vocabulary guesses a few tokens ahead, with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from transformers import PreTrainedModel

from lookfar.cache import SlotCache
from lookfar.choose import greedy
from lookfar.config import DraftModel
from lookfar.drafters.base import Outcome, Proposal
from lookfar.errors import ConfigError
from lookfar.memory import Memory
from lookfar.model import BoundModel
from lookfar.tree import Plan, SequencePlan


class ModelDrafter:
    """One chain of `length` tokens, the small model's own greedy text."""

    name = DraftModel.name
    wants_predictions = False

    def __init__(self, config: DraftModel, model: BoundModel, capacity: int) -> None:
        self.length = config.length
        self.model = model
        self.cache = SlotCache(1, capacity + config.length)
        self.cached: list[int] = []  # the tokens whose keys and values are right

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        same = 0
        # Guesses that were accepted stay cached; the last token is always fed, for its answer.
        while same < min(len(self.cached), len(ids) - 1) and self.cached[same] == ids[same]:
            same += 1
        fresh = list(ids[same:])
        self.cached = list(ids[:same])
        draft: list[int] = []
        for _ in range(min(limit, self.length)):
            plan = Plan([SequencePlan(np.array(fresh, dtype=np.int64), len(self.cached))])
            self.cached += fresh
            fresh = [int(greedy(self.model.forward(plan, self.cache))[0, -1])]
            draft += fresh
        return Proposal.of([draft])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        pass  # what was refused shows in the text


def bind(model: PreTrainedModel | str, memory: Memory) -> BoundModel:
    """The smaller model, loaded and checked once."""
    if model not in memory.draft_models:
        if isinstance(model, str):
            from lookfar.loading import load

            bound = load(model).engine.model
        else:
            bound = BoundModel(model.eval())
        if bound.vocab_size != memory.vocab_size:
            raise ConfigError(
                f"draft_model: its vocabulary has {bound.vocab_size} tokens and the model's {memory.vocab_size}: "
                "use a smaller model of the same family."
            )
        if not bound.support.trees:
            raise ConfigError(f"draft_model: {bound.support.model_type} cannot guess, for {bound.support.reason}.")
        memory.draft_models[model] = bound
    return memory.draft_models[model]
