"""The lookfar state of a model, kept as an attribute of the user's model."""

from __future__ import annotations

import warnings
from threading import Lock
from typing import Any

from transformers import PreTrainedModel

from lookfar.engine.stats import Stats, add_up
from lookfar.errors import LookfarWarning
from lookfar.lm import LM

ATTRIBUTE = "_lookfar"


class ModelState:
    """The LM of a model, created on first use. Copies and pickles of the model start without it."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.options = options or {}
        self.lm: LM | None = None
        self.stats: list[Stats] = []  # of the last call, one for each sequence
        self._warned: set[str] = set()
        self._creating = Lock()

    def lm_of(self, model: PreTrainedModel) -> LM:
        with self._creating:
            if self.lm is None:
                self.lm = LM(model, **self.options)
            return self.lm

    def warn(self, model: PreTrainedModel, reason: str) -> None:
        """Warn once for each reason why a call is not accelerated."""
        if reason and reason not in self._warned:
            self._warned.add(reason)
            message = f"{model.config.model_type} is decoded by transformers itself: {reason}."
            warnings.warn(message, LookfarWarning, stacklevel=5)

    def __deepcopy__(self, memo: Any) -> ModelState:
        return ModelState(self.options)

    def __reduce__(self) -> Any:
        return ModelState, ()


def state_of(model: PreTrainedModel) -> ModelState:
    """Return the state of a model, added if there is none yet."""
    found: ModelState = vars(model).setdefault(ATTRIBUTE, ModelState())
    return found


def refresh(model: PreTrainedModel) -> None:
    """Drop all copies of a model's weights, as `LM.refresh` does."""
    lm = state_of(model).lm
    if lm is not None:
        lm.refresh()


def last_stats(model: PreTrainedModel) -> Stats:
    """Return the counts of the last accelerated `generate` of a model, all its sequences together."""
    return add_up(state_of(model).stats)
