"""The source of an encoder-decoder model: what the decoder of each request reads of it, put together for a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from lookfar.kvcache.base import KVState

MEASURED_SOURCE = 64  # positions of the source that steps are measured with


@dataclass
class EncoderOutput(BaseModelOutput):
    """An encoder's output, as all models take it; those with experts look for the logits of their routers."""

    router_logits: Any = None
    router_probs: Any = None


@dataclass(frozen=True, eq=False)
class SourceKV:
    """What the decoder of one request reads of its source: the same in all steps."""

    kv: KVState  # of the cross-attention layers, [1, heads, source, head_dim]
    mask: torch.Tensor  # [source] True where there is no padding
    hidden: torch.Tensor  # [1, source, hidden] the encoder's output


class SourceBatch:
    """The sources of the requests of a step; kept while these stay the same."""

    def __init__(self) -> None:
        self._sources: Seq[SourceKV] = ()
        self._cache: DynamicCache = DynamicCache()
        self._arguments: dict[str, Any] = {}

    def arguments(self, sources: Seq[SourceKV], text: Cache) -> dict[str, Any]:
        """Return the model's arguments for a step; `text` is the cache of the decoder's own tokens."""
        if len(sources) != len(self._sources) or any(a is not b for a, b in zip(sources, self._sources, strict=True)):
            self._put_together(sources)
        return {**self._arguments, "past_key_values": EncoderDecoderCache(text, self._cache)}

    def _put_together(self, sources: Seq[SourceKV]) -> None:
        longest = max(len(source.mask) for source in sources)
        self._sources, self._cache = sources, DynamicCache()
        for index, first in enumerate(sources[0].kv.layers):
            if first is not None:
                keys, values = (
                    torch.cat([_padded(source.kv.layers[index][part], longest) for source in sources])  # type: ignore[index]
                    for part in (0, 1)
                )
                self._cache.update(keys, values, index)
        mask = torch.cat([_padded(source.mask[None, None, :, None], longest) for source in sources])[:, 0, :, 0]
        hidden = torch.cat([_padded(source.hidden[:, None], longest) for source in sources])[:, 0]
        self._arguments = {"encoder_outputs": EncoderOutput(last_hidden_state=hidden)}
        if not mask.all():
            self._arguments["attention_mask"] = mask.long()


def measured_source(batch: int, hidden_size: int, like: torch.Tensor, text: Cache) -> dict[str, Any]:
    """Return arguments for steps that are only timed: the model computes the KV of a source of zeros."""
    hidden = torch.zeros(batch, MEASURED_SOURCE, hidden_size, dtype=like.dtype, device=like.device)
    cache = EncoderDecoderCache(text, DynamicCache())
    return {"encoder_outputs": EncoderOutput(last_hidden_state=hidden), "past_key_values": cache}


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    """Pad the third axis at its end."""
    missing = length - states.shape[2]
    if not missing:
        return states
    return torch.cat([states, states.new_zeros(*states.shape[:2], missing, *states.shape[3:])], 2)
