"""Attention of a flat step on a CPU, request by request.

The rows of all requests lie side by side. In every layer the rows of each request attend to the KV of its own slot with
the attention function of the model, on views of the KV buffers that are only as long as the request's text.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.models.attention_name import FlatName
from lookfar.models.masks import LayerKind, StepMasks, additive

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request in a flat step, and the keys that they attend to in each kind of layer."""

    rows: slice
    slot: slice
    keys: Seq[slice]  # positions in the slot
    masks: Seq[torch.Tensor | None]  # [1, 1, rows, keys], added to the scores; None: all keys are visible


class _Running(threading.local):
    requests: Seq[RequestRows] | None = None  # of the step that this thread runs


_running = _Running()


@contextmanager
def step_attention(
    plan: StepPlan, slots: Seq[int], kinds: Seq[LayerKind], dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Let models attend to the rows of a step while the context is open, in this thread.

    Yields what each kind of layer takes as its mask, [kinds, 1, 1]: the number of the kind.
    """
    firsts = accumulate(plan.lengths, initial=0)
    _running.requests = [
        _request_rows(rows, first, slot, (kinds, dtype))
        for rows, first, slot in zip(plan.requests, firsts, slots, strict=False)
    ]
    try:
        yield torch.arange(len(kinds))[:, None, None]
    finally:
        _running.requests = None


def _request_rows(rows: RequestPlan, first: int, slot: int, layers: tuple[Seq[LayerKind], torch.dtype]) -> RequestRows:
    kinds, dtype = layers
    end = rows.num_cached + len(rows)
    keys = [slice(kind.first_visible(rows.num_cached), end) for kind in kinds]
    masks: list[torch.Tensor | None] = [None] * len(kinds)
    if len(rows) > 1:
        step = StepMasks(StepPlan([rows]), end, CPU)
        masks = [additive(step.of(kind)[..., seen], dtype) for kind, seen in zip(kinds, keys, strict=True)]
    return RequestRows(slice(first, first + len(rows)), slice(slot, slot + 1), keys, masks)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    own: str,
    **options: Any,
) -> Any:
    """The function that transformers calls: keys and values are whole buffers, and the mask is the kind of the layer.

    Another thread that uses the model meanwhile gets the model's own attention.
    """
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"] if own == "sdpa" else _eager_function(module)
    if _running.requests is None:
        return attend(module, query, key, value, attention_mask, **options)
    if own == "sdpa":
        attend = _grouped_sdpa
    kind, parts = int(attention_mask.flatten()[0]), []
    for request in _running.requests:
        seen, mask = request.keys[kind], request.masks[kind]
        if mask is not None and mask.dtype != query.dtype:
            mask = mask.to(query.dtype)
        k, v = key[request.slot, :, seen], value[request.slot, :, seen]
        parts.append(attend(module, query[:, :, request.rows], k, v, mask, **options)[0])
    return torch.cat(parts, 1), None


def _grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' function, but grouped keys and values are not repeated in memory when there is a mask."""
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def _eager_function(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the attention in a model's own code, which knows its soft caps and sinks."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function


for _own, _mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
    AttentionInterface.register(FlatName(_own), partial(_attend, own=_own))
    AttentionMaskInterface.register(FlatName(_own), _mask)
