"""What lookfar keeps on a model that somebody else owns."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import PreTrainedModel

from lookfar.errors import LookfarWarning
from lookfar.lm import LM
from lookfar.sequence import OnStep
from lookfar.stats import Stats, add_up

PLACE = "_lookfar"


class Attached:
    """The LM of a model, made when it is first needed. Copies and pickles of the model start without it."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = options or {}
        self.lm: LM | None = None
        self.stats: list[Stats] = []  # of the last call, one for each sequence
        self.on_step: OnStep | None = None
        self._warned: set[str] = set()

    def lm_of(self, model: PreTrainedModel) -> LM:
        if self.lm is None:
            self.lm = LM(model, **self.options)
        return self.lm

    def warn(self, model: PreTrainedModel, reason: str) -> None:
        """Say once why something is not faster."""
        if reason not in self._warned:
            self._warned.add(reason)
            message = f"{model.config.model_type} decodes plainly, by transformers itself: {reason}."
            warnings.warn(message, LookfarWarning, stacklevel=5)

    def __deepcopy__(self, memo: Any) -> Attached:
        return Attached(self.options)

    def __reduce__(self) -> Any:
        return Attached, ()


def attached(model: PreTrainedModel) -> Attached:
    """What is kept on a model, added if there is nothing yet."""
    if PLACE not in vars(model):
        vars(model)[PLACE] = Attached()
    found: Attached = vars(model)[PLACE]
    return found


def last_stats(model: PreTrainedModel) -> Stats:
    """What the last accelerated `generate` of a model took, all its sequences together."""
    return add_up(attached(model).stats)
