"""The decoding loop that a model brings along, accelerated or not."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def is_accelerated(model: PreTrainedModel) -> bool:
    return "_lookfar_plain" in vars(type(model))


def own_loop(model: PreTrainedModel) -> Any:
    """transformers' own loop for greedy search and sampling."""
    return (type(model)._lookfar_plain if is_accelerated(model) else type(model))._sample
