"""Time-step limits of Mamba-2 layers: transformers applies them to several tokens at once, and not to single ones.

`generate` decodes with single tokens, so the rows of a decoding step have to do without the limits too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import nn

NO_LIMIT = (0.0, math.inf)
_thread = local()


class TimeStepLimit(tuple[float, float]):
    """The limits of a layer, which read as none in a thread that runs a decoding step. Copies are ordinary tuples."""

    def __getitem__(self, index: Any) -> Any:
        return NO_LIMIT[index] if getattr(_thread, "decodes", False) else super().__getitem__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[float, ...]:
        return tuple(self)

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


def has_time_step_limits(model: nn.Module) -> bool:
    """Whether a model limits time steps."""
    return bool(_limited(model))


def free_time_steps(model: nn.Module) -> None:
    """Let a model's layers do without their limits in decoding steps; for everyone else they stay the same."""
    for layer in _limited(model):
        layer.time_step_limit = TimeStepLimit(layer.time_step_limit)


@contextmanager
def decoding() -> Iterator[None]:
    """Run a decoding step in this thread."""
    _thread.decodes = True
    try:
        yield
    finally:
        _thread.decodes = False


def _limited(model: nn.Module) -> list[Any]:
    found: list[Any] = [module for module in model.modules() if getattr(module, "time_step_limit", None)]
    return [module for module in found if tuple(module.time_step_limit) != NO_LIMIT]
