"""The first forward pass of prompts that are more than text: images, audio, video, the source of an encoder.

It is transformers' own, with the inputs that `generate` prepared. Its KV goes to the slots of its requests, which decode
from there like all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from lookfar.errors import ModelError
from lookfar.kvcache.base import KVState, StateKey, kv_of
from lookfar.kvcache.recurrent import states_of, whole_cache
from lookfar.models.source import SourceKV


@dataclass(frozen=True)
class PrefilledRow:
    """The results of one row of the pass."""

    kv: KVState  # of the prompt, without padding
    logits: torch.Tensor  # [vocabulary] after its last token
    position_offset: int = 0  # of later positions, as the model counts them, against their index in the text
    source: SourceKV | None = None  # of an encoder-decoder model


class FirstForward:
    """The first forward pass of one call of `generate`, for all its rows.

    It runs when the first of its rows is taken. The results of a row are handed out once: a request that has to start
    again runs the pass again.
    """

    def __init__(
        self, model: PreTrainedModel, input_ids: torch.Tensor, inputs: Mapping[str, Any], pads: Seq[int]
    ) -> None:
        self.model = model
        self.input_ids = input_ids  # [batch, length]
        self.inputs = inputs  # as `generate` prepared them
        self.pads = pads  # padding in front of each row
        self._rows: dict[int, PrefilledRow] = {}

    def take(self, rows: Seq[int]) -> list[PrefilledRow]:
        """Return the results of some rows."""
        if not self._rows.keys() >= set(rows):
            self._rows = dict(enumerate(self._run()))
        return [self._rows.pop(row) for row in rows]

    def _run(self) -> list[PrefilledRow]:
        cache = new_cache(self.model)
        logits, positions = self.forward(cache)
        text = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if text.get_seq_length() != self.input_ids.shape[1]:
            raise ModelError(
                f"{self.model.config.model_type} caches {text.get_seq_length()} positions for a prompt of "
                f"{self.input_ids.shape[1]} tokens, which lookfar cannot continue: use model.generate."
            )
        kv = kv_of(text)
        states = states_of(text)
        return [
            PrefilledRow(
                _row_of(kv, row, pad, states),
                logits[row, -1].float(),
                _offset(positions, row, self.input_ids.shape[1] - pad),
                self._source(cache, row),
            )
            for row, pad in enumerate(self.pads)
        ]

    def forward(self, cache: Cache) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the pass with a cache to fill.

        Returns the logits of its last places, [batch, places, vocabulary], and the positions that the model was given.
        """
        inputs = {**self.inputs, "past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            prepared = self.model.prepare_inputs_for_generation(self.input_ids, is_first_iteration=True, **inputs)
            logits: torch.Tensor = self.model(**prepared, return_dict=True).logits
        return logits, prepared.get("position_ids")

    def _source(self, cache: Cache, row: int) -> SourceKV | None:
        if not isinstance(cache, EncoderDecoderCache):
            return None
        kv, hidden = kv_of(cache.cross_attention_cache), self.inputs["encoder_outputs"][0]
        mask = self.inputs.get("attention_mask")
        # The encoder of audio shortens what it gets, and reads all of it.
        if mask is None or mask.shape[1] != kv.length:
            mask = torch.ones(len(hidden), kv.length, dtype=torch.bool, device=hidden.device)
        return SourceKV(_row_of(kv, row, 0), mask[row].bool(), hidden[row : row + 1])


def new_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache that keeps all positions."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return whole_cache(model.config)


def _offset(positions: torch.Tensor | None, row: int, length: int) -> int:
    """Return how far the last position of a row is from its index; multimodal positions are [kinds, batch, length]."""
    if positions is None:
        return 0
    last = positions[-1] if positions.ndim == 3 else positions
    return int(last[row if len(last) > 1 else 0, -1]) - (length - 1)


def _row_of(kv: KVState, row: int, start: int, states: Mapping[StateKey, torch.Tensor] | None = None) -> KVState:
    """Return one row of the KV of a batch, from position `start` on, and of its recurrent states."""
    layers = [
        None if layer is None else (layer[0][row : row + 1, :, start:], layer[1][row : row + 1, :, start:])
        for layer in kv.layers
    ]
    own_states = {key: state[row : row + 1] for key, state in (states or {}).items()}
    return KVState(layers, kv.length - start, own_states)
