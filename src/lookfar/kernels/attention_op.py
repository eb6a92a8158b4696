"""Tree attention under a name that transformers models can be run with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from lookfar.kernels import reference

NAME = "lookfar"


@torch.library.custom_op("lookfar::tree_attention", mutates_args=())
def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """The kernels as a torch operator, so that compilers leave them as they are; the reference without a GPU."""
    if query.device.type == "cuda":
        from lookfar.kernels.attention import attend

        return attend(query, keys, values, table, sinks, scale, softcap)
    return reference.attend(query, keys, values, table, sinks, scale, softcap)


@tree_attention.register_fake
def _(query: torch.Tensor, keys: Any, values: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: keys and values are whole buffers, and the mask is a row table."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_attention(query, key, value, attention_mask, s_aux, float(scale), float(softcap or 0.0)), None


AttentionInterface.register(NAME, attention)
