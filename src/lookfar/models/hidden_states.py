"""The last hidden states of a forward pass, for drafters that draft from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from transformers import PreTrainedModel


class HiddenStates:
    """What the decoder returned while `recorded` was open: one tensor, [batch, rows, hidden], for each call."""

    row_wise = True  # what it does does not depend on positions, see hooks.py

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []
        self._thread = get_ident()

    def __call__(self, module: Any, arguments: Any, output: Any) -> None:
        """Record an output, as a forward hook. Another thread may be using the model too."""
        if get_ident() == self._thread:
            self.calls.append(output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0])

    def of_request(self, place: int) -> torch.Tensor:
        """Return the states of one request of a padded step, [rows, hidden]; a model may take them one by one."""
        return self.calls[place][0] if len(self.calls) > 1 else self.calls[0][place]


@contextmanager
def recorded(model: PreTrainedModel, wanted: bool = True) -> Iterator[HiddenStates | None]:
    """Record the states of the forward passes of this thread while the context is open, if they are wanted."""
    if not wanted:
        yield None
        return
    states = HiddenStates()
    hook = model.get_decoder().register_forward_hook(states)
    try:
        yield states
    finally:
        hook.remove()
