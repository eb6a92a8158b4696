"""Binds an unmodified transformers model to `forward(plan, cache)`: a mask, positions and a cache, nothing patched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from lookfar.alibi import positions_as_bias
from lookfar.cache import SlotCache
from lookfar.masks import StepMasks
from lookfar.pack import PackedLinears, pack_by_default
from lookfar.support import Support, examine
from lookfar.tree import Plan


class BoundModel:
    """A causal language model that takes plans."""

    def __init__(self, model: PreTrainedModel, support: Support | None = None, pack: bool | None = None) -> None:
        self.model = model
        self._packed = PackedLinears(model) if (pack_by_default(model) if pack is None else pack) else None
        self.support = support or examine(model.config, type(model))
        self._takes = set(inspect.signature(model.forward).parameters)
        self._attention = _mask_attention(model)

    @property
    def device(self) -> torch.device:
        """Where token ids go; with `device_map` the place of the embeddings."""
        place: torch.device = self.model.get_input_embeddings().weight.device
        if place.type == "meta":  # offloaded by accelerate, which says where it will be run
            return torch.device(self.model.get_input_embeddings()._hf_hook.execution_device)
        return place

    @property
    def packed(self) -> bool:
        """Do its linear layers run with packed weights?"""
        return self._packed is not None and bool(self._packed.layers)

    @property
    def packed_bytes(self) -> int:
        """The memory that packed weights take beside the model's own."""
        return self._packed.nbytes if self._packed is not None else 0

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def forward(self, plan: Plan, cache: SlotCache, embeds: Seq[torch.Tensor | None] | None = None) -> torch.Tensor:
        """Run a step. Returns the logits of the plan's kept rows, [batch, kept, vocabulary].

        `embeds` may hold, for each sequence, what its prompt's tokens are fed as, [tokens, hidden].
        """
        if self.support.one_by_one and plan.batch > 1:
            alone = [
                Plan([one], plan.first_slot + i, kept=np.minimum(plan.kept, len(one) - 1))
                for i, one in enumerate(plan.sequences)
            ]
            given = embeds or [None] * plan.batch
            return torch.cat([self.forward(one, cache, [own]) for one, own in zip(alone, given, strict=True)])
        cache.begin(plan)
        kept = torch.from_numpy(plan.kept).to(self.device)
        with ExitStack() as during, torch.no_grad(), self.attending(self._attention):
            if self._packed is not None:
                during.enter_context(self._packed.in_use())
            arguments = {"logits_to_keep": kept if len(kept) else 1} | self._shape_of_step(plan, cache, during)
            arguments = {name: value for name, value in arguments.items() if name in self._takes}
            logits: torch.Tensor = self.model(
                **self._inputs(plan, embeds or ()),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **arguments,
            ).logits
        return logits if "logits_to_keep" in arguments else logits[:, kept.to(logits.device)]

    def _inputs(self, plan: Plan, embeds: Seq[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Tokens; or their embeddings, if some of them were given as such."""
        tokens = torch.from_numpy(plan.tokens).to(self.device)
        fed = [
            given is not None and rows.cached < len(given) for given, rows in zip(embeds, plan.sequences, strict=False)
        ]
        if not any(fed):
            return {"input_ids": tokens}
        made: torch.Tensor = self.model.get_input_embeddings()(tokens)
        for i, (given, rows) in enumerate(zip(embeds, plan.sequences, strict=True)):
            if given is not None:
                part = given[rows.cached : rows.cached + len(rows.chain)]
                made[i, : len(part)] = part.to(made)
        return {"inputs_embeds": made}

    def _shape_of_step(self, plan: Plan, cache: SlotCache, during: ExitStack) -> dict[str, Any]:
        """Masks and positions. A straight step gets no mask: the model masks it as in its own `generate`."""
        if plan.straight:
            return {"position_ids": torch.from_numpy(plan.positions).to(self.device)}
        masks = StepMasks(plan, cache.kv_length, self.device)
        positions = masks.query_positions
        if self.support.max_positions is not None:
            # Only riders can point past the last position, and what they bring there is never used.
            positions = positions.clamp(max=self.support.max_positions - 1)
        if self.support.alibi:
            during.enter_context(positions_as_bias(self.model, masks))
            return {"position_ids": positions}
        made = {name: self._as_argument(masks.of(kind)) for name, kind in self.support.kinds.items()}
        return {
            "position_ids": positions,
            "attention_mask": made if self.support.by_layer_type else next(iter(made.values())),
        }

    def _as_argument(self, mask: torch.Tensor) -> torch.Tensor:
        if self._attention == "sdpa":
            return mask
        hidden = torch.finfo(self.model.dtype).min
        return torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device).masked_fill_(~mask, hidden)

    def forward_packed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        cache: Cache,
        forward: Callable[..., Any],
    ) -> torch.Tensor:
        """Run rows that lie side by side, [1, rows], told by tables instead of masks. All logits, [rows, vocabulary].

        `forward` is the model's own or what a compiler made of it.
        """
        by_kind = dict(zip(self.support.kinds, tables[:, None, None], strict=True))
        arguments = {
            "position_ids": positions,
            "attention_mask": by_kind if self.support.by_layer_type else next(iter(by_kind.values())),
        }
        arguments = {name: value for name, value in arguments.items() if name in self._takes}
        with torch.no_grad():
            logits: torch.Tensor = forward(
                input_ids=tokens, past_key_values=cache, use_cache=True, return_dict=True, **arguments
            ).logits
        return logits[0]

    @property
    def has_experts(self) -> bool:
        """Is it a mixture of experts that transformers can multiply in several ways?"""
        return self.model.config._experts_implementation is not None and self.model._can_set_experts_implementation()

    @contextmanager
    def experts(self, name: str | None) -> Iterator[None]:
        """Run the model with its experts multiplied in another way; None leaves them alone."""
        before = self.model.config._experts_implementation if name is not None else None
        if name is not None:
            self.model.set_experts_implementation(name)
        try:
            yield
        finally:
            if before is not None:
                self.model.set_experts_implementation(before)

    @contextmanager
    def attending(self, name: str) -> Iterator[None]:
        """Run the model with another attention (its own may take no masks: flash, flex)."""
        config = self.model.config
        before = config._attn_implementation
        if before == name:
            yield
            return
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = before


def _mask_attention(model: PreTrainedModel) -> str:
    """The attention to run with: the model's own if it takes a dense mask."""
    own = model.config._attn_implementation
    if own in ("sdpa", "eager"):
        return str(own)
    return "sdpa" if model._supports_sdpa else "eager"
