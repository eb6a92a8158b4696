"""Binds an unmodified transformers model to step plans: it gets masks, positions and a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from lookfar.core.arrays import Ints
from lookfar.core.plan import StepPlan
from lookfar.core.progress import progress_bar
from lookfar.errors import ConfigError
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.alibi import positions_as_bias
from lookfar.models.attention_name import attention_replaced, own_attention
from lookfar.models.compiled_families import replaced_methods, why_not_compiled
from lookfar.models.decoder_positions import positions_in_decoder
from lookfar.models.masks import StepMasks, additive
from lookfar.models.mtp_heads import MtpHeads, load_heads, why_no_heads
from lookfar.models.packed_decoder import PackedDecoder
from lookfar.models.packed_linear import PackedLinears, has_room
from lookfar.models.source import SourceBatch, measured_source
from lookfar.models.support import STATE_TYPES, Support, examine
from lookfar.models.time_steps import decoding, free_time_steps
from lookfar.models.weight_changes import ModelChange, ModelFingerprint


@dataclass(frozen=True)
class FlatRows:
    """The rows of a step side by side, without padding between requests."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    tables: torch.Tensor  # [kinds of layers, …, …]: what attention gets as a mask, see row_table.py
    embeds: torch.Tensor | None = None  # [rows, hidden] to feed instead of the tokens
    logit_rows: torch.Tensor | None = None  # rows whose logits are wanted; None: all


class BoundModel:
    """A language model that runs step plans."""

    def __init__(self, model: PreTrainedModel, support: Support | None = None, pack: bool | None = None) -> None:
        self.model = model
        self.support = support or examine(model.config, type(model))
        self._why_not_compiled = ""  # if its compiled step was tried and gave other logits
        packed = self._new_packed()
        self._packed = packed if (has_room(packed.nbytes) if pack is None else pack) else None
        self._parameters = set(inspect.signature(model.forward).parameters)
        self.cache_argument = "past_key_values" if "past_key_values" in self._parameters else "cache_params"
        if self.support.recurrent:
            free_time_steps(model)
        self.attention = _mask_attention(model)
        self._sources = SourceBatch()
        self.first_pass_checked = False
        self.first_pass_refused = ""  # why transformers has to decode prompts with images or a source
        self._shape = self._present_shape()
        self.fingerprint = ModelFingerprint.of(model)
        self._patched = replaced_methods(model)
        self._heads: MtpHeads | ConfigError | None = None  # None: not loaded yet

    def _new_packed(self) -> PackedLinears | PackedDecoder:
        if self._why_not_compiled or why_not_compiled(self.model):
            return PackedLinears(self.model)
        return PackedDecoder(self.model, self.support.kinds)

    @property
    def decoder(self) -> PackedDecoder | None:
        """Its weights for compiled steps, where its layers can be run as compiled code."""
        return self._packed if isinstance(self._packed, PackedDecoder) else None

    def _follow_structure(self) -> None:
        """Pack weights as the present modules of the model need it."""
        compiles = not (self._why_not_compiled or why_not_compiled(self.model))
        if isinstance(self._packed, PackedDecoder) and compiles:
            self._packed.find_layers()
        elif self._packed is not None and (compiles or isinstance(self._packed, PackedDecoder)):
            self._packed = self._new_packed()

    def refuse_compiled(self, reason: str) -> None:
        """Leave its layers to torch."""
        self._why_not_compiled = reason
        self._packed = None if self._packed is None else self._new_packed()

    def refresh(self, everything: bool = False) -> ModelChange:
        """Follow changes of the model. Not while a step runs.

        `everything` also drops copies of weights that seem unchanged.
        """
        self.attention = _mask_attention(self.model)
        fingerprint, self.fingerprint = self.fingerprint, ModelFingerprint.of(self.model)
        patched, self._patched = self._patched, replaced_methods(self.model)
        rebuilt = fingerprint.structure != self.fingerprint.structure or patched != self._patched
        if rebuilt:
            self._follow_structure()
        dropped = self._packed is not None and self._packed.refresh(everything)
        before, self._shape = self._shape, self._present_shape()
        if before != self._shape:
            self._heads = None
            return ModelChange.SHAPE
        if everything or dropped or rebuilt or fingerprint != self.fingerprint:
            if isinstance(self._heads, MtpHeads):
                self._heads.follow(self.model)
            return ModelChange.WEIGHTS
        return ModelChange.NONE

    def _present_shape(self) -> tuple[Any, ...]:
        return self.model.dtype, self.device, self.vocab_size

    @property
    def device(self) -> torch.device:
        """Where token ids go; with `device_map` the device of the embeddings."""
        place: torch.device = self.embeddings.weight.device
        if place.type == "meta":  # offloaded by accelerate, which knows where it will be run
            return torch.device(self.embeddings._hf_hook.execution_device)
        return place

    @property
    def embeddings(self) -> Any:
        """The embeddings of the tokens that it decodes."""
        model = self.model.get_decoder() if self.model.config.is_encoder_decoder else self.model
        return model.get_input_embeddings()

    @property
    def packed(self) -> bool:
        """Whether its linear layers run with packed weights."""
        return self._packed is not None and bool(self._packed.layers)

    @property
    def packed_bytes(self) -> int:
        """The memory that packed weights take beside the model's own."""
        return self._packed.nbytes if self._packed is not None else 0

    @cached_property
    def has_heads(self) -> bool:
        """Whether its checkpoint holds multi-token-prediction layers."""
        return not why_no_heads(self.model)

    @property
    def heads(self) -> MtpHeads:
        """The multi-token-prediction layers of its checkpoint, loaded on first use; a `ConfigError` without them."""
        if self._heads is None:
            try:
                self._heads = load_heads(self.model)
            except ConfigError as error:
                self._heads = error
        if isinstance(self._heads, ConfigError):
            raise self._heads
        return self._heads

    @property
    def vocab_size(self) -> int:
        return int(self.embeddings.weight.shape[0])

    def forward(self, plan: StepPlan, cache: SlotKVCache) -> torch.Tensor:
        """Run a step. Returns the logits of the plan's logit rows, [batch, logit rows, vocabulary]."""
        if self.support.one_by_one and plan.batch > 1:
            return torch.cat([self.forward(one, cache) for one in plan.split()])
        writer = cache.writer(plan)
        logit_rows = torch.from_numpy(plan.logit_rows).to(self.device)
        with ExitStack() as during, torch.no_grad(), self.attending(self.attention), self.packed_weights():
            if self.support.recurrent and not plan.prefills:
                during.enter_context(decoding())
            arguments: dict[str, Any] = {"logits_to_keep": logit_rows if len(logit_rows) else 1}
            arguments |= self._positions_and_mask(plan, cache.buffers.kv_length, during)
            arguments = {name: value for name, value in arguments.items() if name in self._parameters}
            arguments[self.cache_argument] = writer
            arguments |= self._inputs(plan)
            if self.support.encoder_decoder:
                arguments = self._decoder_arguments(arguments, plan)
            logits: torch.Tensor = self.model(use_cache=True, return_dict=True, **arguments).logits
        return logits if "logits_to_keep" in arguments else logits[:, logit_rows.to(logits.device)]

    def _decoder_arguments(self, arguments: dict[str, Any], plan: StepPlan) -> dict[str, Any]:
        """Return arguments for the decoder of an encoder-decoder model, with the sources of the requests."""
        text = arguments.pop("past_key_values")
        sources = [rows.source for rows in plan.requests]
        if any(source is None for source in sources):
            like = self.embeddings.weight
            others = measured_source(plan.batch, like.shape[1], like, text)
        else:
            others = self._sources.arguments(sources, text)
        names = {name: f"decoder_{name}" for name in ("input_ids", "inputs_embeds", "attention_mask")}
        return {names.get(name, name): value for name, value in arguments.items() if name != "position_ids"} | others

    def forget(self) -> None:
        """Keep nothing of the requests of the last step."""
        self._sources = SourceBatch()

    @property
    def packing_left(self) -> bool:
        """Whether the first forward pass would have to pack weights."""
        return self._packed is not None and bool(self._packed.missing)

    def pack(self) -> None:
        """Pack all weights now."""
        packed: Any = self._packed
        layers = packed.missing if packed is not None else []
        with torch.no_grad(), progress_bar("Packing weights", len(layers)) as advance:
            for layer in layers:
                packed.pack(layer)
                advance(1)

    def packed_weights(self) -> AbstractContextManager[None]:
        """Let linear layers compute with packed weights while the context is open, if there are any."""
        return self._packed.in_use() if isinstance(self._packed, PackedLinears) else nullcontext()

    def _inputs(self, plan: StepPlan) -> dict[str, torch.Tensor]:
        """Return token ids, or embeddings if part of a prompt was given as embeddings."""
        tokens = torch.from_numpy(plan.tokens).to(self.device)
        if not feeds_embeds(plan):
            return {"input_ids": tokens}
        return {"inputs_embeds": self.embed(tokens, plan, list)}

    def embed(
        self, tokens: torch.Tensor, plan: StepPlan, split: Callable[[torch.Tensor], Seq[torch.Tensor]]
    ) -> torch.Tensor:
        """Return the embeddings of a step: those of its tokens, and those that were given with prompts.

        `split` returns the part of each request in a tensor of all of them.
        """
        with torch.no_grad():
            embeds: torch.Tensor = self.model.get_input_embeddings()(tokens)
            for rows, own in zip(plan.requests, split(embeds), strict=True):
                if rows.embeds is not None:
                    part = rows.embeds[rows.num_cached : rows.num_cached + len(rows.pending)]
                    own[: len(part)] = part.to(own)
        return embeds

    def _positions_and_mask(self, plan: StepPlan, kv_length: int, during: ExitStack) -> dict[str, Any]:
        """Return positions and masks. A causal step gets no mask: the model masks it as in its own `generate`."""
        if plan.is_causal or (self.support.mode == "chain" and self._is_one_block(plan, kv_length)):
            return {"position_ids": self._model_positions(plan.num_cached[:, None] + np.arange(plan.width), plan)}
        masks = StepMasks(plan, kv_length, self.device)
        positions = self._model_positions(plan.positions, plan)
        if self.support.encoder_decoder:
            during.enter_context(positions_in_decoder(self.model, masks, positions))
        if self.support.alibi:
            during.enter_context(positions_as_bias(self.model, masks))
            return {"position_ids": positions}
        by_kind: dict[str, torch.Tensor | None] = {
            name: self._as_argument(masks.of(kind)) for name, kind in self.support.kinds.items()
        }
        if self.support.recurrent:
            by_kind |= dict.fromkeys(STATE_TYPES)  # padding stands behind all other rows of a state
        mask = by_kind if self.support.by_layer_type else next(iter(by_kind.values()))
        return {"position_ids": positions, "attention_mask": mask}

    def _model_positions(self, positions: Ints, plan: StepPlan) -> torch.Tensor:
        """Return positions as the model counts them, [batch, rows]."""
        if self.support.max_positions is not None:
            # Only padding and window rows can point past the last position: what they compute there is never used.
            positions = np.minimum(positions, self.support.max_positions - 1)
        return torch.from_numpy(positions + plan.position_offsets[:, None]).to(self.device)

    def _is_one_block(self, plan: StepPlan, kv_length: int) -> bool:
        """Whether a step with chains needs no mask: all texts have one length, or no layer looks at other tokens.

        Padding stands behind all other rows, which do not see it.
        """
        if not self.support.kinds:
            return True
        one_length = bool((plan.num_cached == plan.num_cached[0]).all())
        return one_length and kv_length == plan.num_cached[0] + plan.width

    def _as_argument(self, mask: torch.Tensor) -> torch.Tensor:
        return mask if self.attention == "sdpa" else additive(mask, self.model.dtype)

    def forward_flat(self, rows: FlatRows, cache: Cache, forward: Callable[..., Any]) -> torch.Tensor:
        """Run rows that lie side by side. Returns the logits of the rows that are wanted, [rows, vocabulary].

        `forward` is the model's own, or a compiled one.
        """
        by_kind = dict(zip(self.support.kinds, rows.tables[:, None, None], strict=True))
        mask = by_kind if self.support.by_layer_type else next(iter(by_kind.values()))
        arguments = {"position_ids": rows.positions[None], "attention_mask": mask}
        if rows.logit_rows is not None:
            arguments["logits_to_keep"] = rows.logit_rows
        arguments = {name: value for name, value in arguments.items() if name in self._parameters}
        if rows.embeds is None:
            arguments["input_ids"] = rows.tokens[None]
        else:
            arguments["inputs_embeds"] = rows.embeds[None]
        with torch.no_grad():
            found = forward(past_key_values=cache, use_cache=True, return_dict=True, **arguments)
        logits: torch.Tensor = found.logits[0]
        return logits if rows.logit_rows is None or "logits_to_keep" in arguments else logits[rows.logit_rows]

    def refuse(self, reason: str) -> None:
        """Give up speculation for this model."""
        self.support = replace(self.support, mode="none", reason=reason)

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts that transformers can multiply in several ways."""
        return self.model.config._experts_implementation is not None and self.model._can_set_experts_implementation()

    @contextmanager
    def experts(self, name: str | None) -> Iterator[None]:
        """Use another experts implementation while the context is open; None changes nothing."""
        before = self.model.config._experts_implementation if name is not None else None
        if name is not None:
            self.model.set_experts_implementation(name)
        try:
            yield
        finally:
            if before is not None:
                self.model.set_experts_implementation(before)

    def attending(self, name: str) -> AbstractContextManager[None]:
        """Run the model with another attention while the context is open (its own may take no masks: flash, flex)."""
        return attention_replaced(self.model.config, name)


def feeds_embeds(plan: StepPlan) -> bool:
    """Whether rows of a step are given as embeddings."""
    return any(rows.embeds is not None and rows.num_cached < len(rows.embeds) for rows in plan.requests)


def _mask_attention(model: PreTrainedModel) -> str:
    """Return the attention to run with: the model's own if it takes a dense mask."""
    own = own_attention(model.config)
    if own in ("sdpa", "eager"):
        return own
    return "sdpa" if model._supports_sdpa else "eager"
