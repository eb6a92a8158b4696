"""The first forward pass of prompts that are more than text: images, audio, video, the source of an encoder.

It is transformers' own, with the inputs that `generate` prepared. Its KV goes to the slots of its requests, which
decode from there like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookfar.errors import FirstPassError
from lookfar.kvcache.base import KVState, StateKey, kv_of
from lookfar.kvcache.recurrent import states_of, whole_cache
from lookfar.models.source import SourceKV
from lookfar.models.time_steps import decoding


@dataclass(frozen=True)
class PrefilledRow:
    """The results of one row of the pass."""

    kv: KVState  # of the prompt, without padding
    logits: torch.Tensor  # [vocabulary] after its last token
    position_offset: int = 0  # of later positions, as the model counts them, against their index in the text
    source: SourceKV | None = None  # of an encoder-decoder model


Check = Callable[["FirstForward", Cache, "list[PrefilledRow]"], None]


class FirstForward:
    """The first forward pass of one call of `generate`, for all its rows.

    It runs when the first of its rows is taken. The results of a row are handed out once: a request that has to start
    again runs the pass again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        inputs: Mapping[str, Any],
        pads: Seq[int],
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.input_ids = input_ids  # [batch, length]
        self.inputs = inputs  # as `generate` prepared them
        self.pads = pads  # padding in front of each row
        self.given = given  # what `generate` would be called with, if that is known
        self._rows: dict[int, PrefilledRow] = {}

    def take(self, rows: Seq[int], check: Check | None = None) -> list[PrefilledRow]:
        """Return the results of some rows; those of a pass that runs now can be checked, with its cache."""
        if not self._rows.keys() >= set(rows):
            cache, found = self._run()
            if check is not None:
                check(self, cache, found)
            self._rows = dict(enumerate(found))
        return [self._rows.pop(row) for row in rows]

    def _run(self) -> tuple[Cache, list[PrefilledRow]]:
        cache = new_cache(self.model)
        logits, positions = self.forward(cache)
        text = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        kv, states = kv_of(text), states_of(text)
        length = self.input_ids.shape[1]
        if any(layer is not None and layer[0].shape[-2] != length for layer in kv.layers):
            raise FirstPassError(
                f"{self.model.config.model_type} does not cache one position for each token of a prompt: "
                "use model.generate for this one."
            )
        return cache, [
            PrefilledRow(
                _row_of(kv, row, pad, states),
                logits[row, -1].float(),
                _offset(positions, row, length - pad),
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

    def decode(self, cache: Cache, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after one more token of each row, [batch, 1], as `generate` computes them."""
        has_encoder = self.model.config.is_encoder_decoder
        done = CausalLMOutputWithPast(past_key_values=cache)
        kwargs = self.model._update_model_kwargs_for_generation(done, {**self.inputs, "use_cache": True}, has_encoder)
        text = torch.cat([self.input_ids, tokens.to(self.input_ids.device)], -1)
        with torch.no_grad():
            prepared = self.model.prepare_inputs_for_generation(text, next_sequence_length=1, **kwargs)
            logits: torch.Tensor = self.model(**prepared, return_dict=True).logits
        return logits[:, -1]

    def replay(self, cache: Cache, answer: torch.Tensor) -> torch.Tensor:
        """Run the pass and then an answer, [batch, tokens], with a cache to fill; returns the logits after the prompt
        and after each of these tokens.
        """
        prompt, positions = self.forward(cache)
        if not answer.shape[1]:
            return prompt[:, -1:]
        inputs: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        mask = self.inputs.get("attention_mask")
        if self.model.config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": answer, "encoder_outputs": self.inputs["encoder_outputs"]}
        else:
            inputs["input_ids"] = answer
            mask = torch.cat([mask, mask.new_ones(answer.shape)], -1) if mask is not None else None
        if mask is not None:
            inputs["attention_mask"] = mask
        if positions is not None:
            inputs["position_ids"] = positions[..., -1:] + 1 + torch.arange(answer.shape[1], device=positions.device)
        with torch.no_grad(), decoding():
            logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        return torch.cat([prompt[:, -1:], logits], 1)

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


def ends_with_image(positions: torch.Tensor | None) -> bool:
    """Whether the last positions of prompts differ in time, height and width, so that text cannot simply continue."""
    if positions is None or positions.ndim != 3:
        return False
    last = positions[-3:, :, -1]  # in front of these there may be the positions of text
    return not bool((last == last[-1]).all())


def _offset(positions: torch.Tensor | None, row: int, length: int) -> int:
    """Return how far the last position of a row is from its index; multimodal positions are [kinds, batch, length]."""
    if positions is None:
        return 0
    last = positions[-1] if positions.ndim == 3 else positions
    return int(last[row if len(last) > 1 else 0, -1]) - (length - 1)


def _row_of(kv: KVState, row: int, start: int, states: Mapping[StateKey, torch.Tensor] | None = None) -> KVState:
    """Return one row of the KV of a batch, from position `start` on, and of its recurrent states."""
    layers = [None if layer is None else tuple(part[row : row + 1, :, start:] for part in layer) for layer in kv.layers]
    own_states = {key: state[row : row + 1].clone() for key, state in (states or {}).items()}  # updated in place
    return KVState(layers, kv.length - start, own_states)
