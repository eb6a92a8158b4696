"""Positions of decoders that count them themselves, in tree form.

The decoders of encoder-decoder models take no positions: they count from the length of the cache. In a tree step, or in
a batch of texts of different lengths, that is not the position of a row. While the context is open, a hook reads the
model's own position embeddings at the rows' positions (BART and its kin), or the model's own relative bias is computed
between the positions of rows and keys (T5 and its kin). Forward passes of other threads are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lookfar.models.masks import StepMasks

# Decoders that embed positions with a module `embed_positions`.
EMBEDDED = {"bart", "mbart", "plbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "m2m_100", "whisper"}
# Decoders whose self-attention adds a bias by the distance between tokens.
RELATIVE = {"t5", "mt5", "umt5"}


class _Running(threading.local):
    masks: StepMasks | None = None  # of the step that this thread runs


_running = _Running()
_lock = threading.Lock()
_replaced: dict[int, int] = {}  # by the id of an attention module: the steps that run with it


@contextmanager
def positions_in_decoder(model: PreTrainedModel, masks: StepMasks, positions: torch.Tensor) -> Iterator[None]:
    """Let the decoder of `model` compute with given positions, [batch, rows], while the context is open."""
    decoder = model.get_decoder()
    with ExitStack() as stack:
        if model.config.model_type in RELATIVE:
            stack.enter_context(_bias_between_positions(decoder, masks))
        else:
            stack.enter_context(_embeddings_at(decoder.embed_positions, positions))
        yield


@contextmanager
def _embeddings_at(module: nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Let the module embed the range of the positions, and pick from it."""
    thread = threading.get_ident()
    first, count = int(positions.min()), int(positions.max() - positions.min()) + 1
    padding: list[torch.Tensor] = []

    def ask_for_range(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if threading.get_ident() != thread:
            return None  # another caller's forward pass
        example = args[0] if args else next(iter(kwargs.values()))
        tokens: Any = (1, count)
        if isinstance(example, torch.Tensor):
            tokens = torch.full((1, count), getattr(module, "padding_idx", None) or 0, device=example.device) + 1
            if hasattr(module, "create_position_ids_from_input_ids"):  # there, padding has no position
                padding.append(example.eq(module.padding_idx)[..., None])  # type: ignore[arg-type]
        given: dict[str, Any] = {"past_key_values_length": first}
        if "position_ids" in kwargs:
            given["position_ids"] = torch.arange(first, first + count, device=kwargs["position_ids"].device)
        return (tokens,), given

    def pick(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if threading.get_ident() != thread:
            return None
        found = output.reshape(count, -1)[(positions - first).to(output.device)]
        return found.masked_fill(padding.pop(), 0.0) if padding else found

    with ExitStack() as hooks:
        ask_for_range.row_wise = pick.row_wise = True  # type: ignore[attr-defined] # see hooks.py
        hooks.callback(module.register_forward_pre_hook(ask_for_range, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(pick).remove)
        yield


@contextmanager
def _bias_between_positions(decoder: nn.Module, masks: StepMasks) -> Iterator[None]:
    modules = [module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False)]
    with _lock:
        for module in modules:
            if not _replaced.get(id(module)):
                vars(module)["compute_bias"] = partial(_compute_bias, module)
            _replaced[id(module)] = _replaced.get(id(module), 0) + 1
    _running.masks = masks
    try:
        yield
    finally:
        _running.masks = None
        with _lock:
            for module in modules:
                _replaced[id(module)] -= 1
                if not _replaced[id(module)]:
                    del _replaced[id(module)], vars(module)["compute_bias"]


def _compute_bias(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The module's own function, with the positions of rows and keys: [batch, heads, rows, keys]."""
    masks = _running.masks
    if masks is None:  # another caller's forward pass
        own: torch.Tensor = type(module).compute_bias(module, *args, **kwargs)
        return own
    weight = module.relative_attention_bias.weight
    distance = (masks.key_positions[:, None] - masks.query_positions[:, :, None]).to(weight.device)
    if "bidirectional" in type(module)._relative_position_bucket.__code__.co_varnames:
        options = {"num_buckets": module.relative_attention_num_buckets}
        options["max_distance"] = module.relative_attention_max_distance
        buckets = module._relative_position_bucket(distance, bidirectional=False, **options)
    else:
        buckets = module._relative_position_bucket(distance)
    values: torch.Tensor = module.relative_attention_bias(buckets)
    return values.permute(0, 3, 1, 2)
