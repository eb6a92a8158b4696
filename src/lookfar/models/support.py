"""Which kind of speculation a model supports, and why: read from its config and class, never from its weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from lookfar.errors import ModelError
from lookfar.models.alibi import uses_alibi
from lookfar.models.masks import LayerKind

# Families whose attention ignores the mask or the positions that it is given.
FALLBACK_FAMILIES = {
    "gpt_neo": "its local layers measure distance by the index in the cache",
    "doge": "its attention selects keys by a rule of its own",
    "blt": "its patches depend on the tokens around them",
}
BIDIRECTIONAL_PROMPTS = {"paligemma"}
MASK_FUNCTION = {"window": "create_sliding_window_causal_mask", "chunk": "create_chunked_causal_mask"}
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class Support:
    """The features of a model that speculation depends on. `reason` is empty when draft trees can be verified."""

    model_type: str
    reason: str = ""
    kinds: dict[str, LayerKind] = field(default_factory=dict)  # by layer type
    by_layer_type: bool = False  # the model takes one mask for each layer type
    alibi: bool = False
    one_by_one: bool = False  # a forward pass takes one request only
    max_positions: int | None = None  # None: no limit
    takes_media: bool = False  # prompts may hold images, audio or video
    first_pass: bool = False  # transformers has to run every prompt, because its tokens see later ones
    tree_limit: int | None = None  # trees are exact up to this length; longer requests use the fallback

    @property
    def trees(self) -> bool:
        """Whether draft trees can be verified with this model."""
        return not self.reason


def examine(config: PreTrainedConfig, model_class: type | None = None) -> Support:
    """Examine a config; raises `ModelError` if it is not one of a causal language model."""
    text = config.get_text_config(decoder=True)
    model_class = model_class or causal_class(config)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder model, and lookfar decodes causal models only.")
    by_layer_type, kinds = _layer_kinds(text, _code(text, model_class))
    facts: dict[str, Any] = {
        "kinds": kinds,
        "by_layer_type": by_layer_type,
        "alibi": uses_alibi(text),
        "one_by_one": text.model_type == "mpt",
        "max_positions": _max_positions(text),
        "takes_media": takes_media(model_class),
        "first_pass": config.model_type in BIDIRECTIONAL_PROMPTS,
        "tree_limit": _tree_limit(text),
    }
    return Support(config.model_type, reason=_why_not(config, text, model_class, kinds), **facts)


def _code(text: PreTrainedConfig, model_class: type) -> list[ModuleType]:
    """Return the modules that may create the masks of a model: its own, and that of its text model."""
    classes = [model_class]
    if type(text) in MODEL_MAPPING:
        classes.append(MODEL_MAPPING[type(text)])
    return [sys.modules[one.__module__] for one in classes]


def causal_class(config: PreTrainedConfig) -> type:
    """Return the class that transformers loads for this config."""
    auto_map = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in auto_map:
        raise ModelError(
            f"{config.model_type} brings its own code: "
            "load it with transformers and pass it to lookfar.LM(model, tokenizer)."
        )
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ModelError(
            f"transformers has no causal language model for {config.model_type!r}: give a text-generation model."
        ) from None
    causal: type = found[0] if isinstance(found, tuple) else found
    return causal


def _why_not(config: PreTrainedConfig, text: PreTrainedConfig, model_class: type, kinds: dict[str, LayerKind]) -> str:
    """Return why trees cannot be verified; empty if they can."""
    for model_type in (config.model_type, text.model_type):
        if model_type in FALLBACK_FAMILIES:
            return FALLBACK_FAMILIES[model_type]
    if _mixes_rows(config):
        return (
            "its 8-bit layers choose outlier columns over all rows of a step, so draft tokens would change the result"
        )
    others = set(getattr(text, "layer_types", None) or ("unknown",)) - set(LAYER_TYPES)
    if others and getattr(model_class, "_is_stateful", False):
        return "its recurrent state cannot be rolled back to a branch of a tree"
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"its cache has layers of the type {type(layer).__name__}, which cannot be rolled back to a branch"
    if others - {"unknown"}:
        return f"it has layers of the type {min(others)}, which are not ordinary attention"
    if unmasked := _unmasked(kinds, text, model_class):
        return f"its config names a {unmasked} that its attention does not follow"
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    if "past_key_values" not in parameters:
        return "it has no KV cache"
    if "position_ids" not in parameters and not uses_alibi(text):
        return "its forward method takes no positions"
    return ""


def takes_media(model_class: type) -> bool:
    """Whether the prompts of a class of models may hold images, audio or video."""
    return getattr(model_class, "input_modalities", "text") not in ("text", ("text",), ["text"])


def _mixes_rows(config: PreTrainedConfig) -> bool:
    """Whether rows influence each other: LLM.int8() treats a column as an outlier as soon as one row does."""
    quantised = getattr(config, "quantization_config", None) or {}
    settings = quantised if isinstance(quantised, dict) else quantised.to_dict()
    return bool(settings.get("load_in_8bit")) and settings.get("llm_int8_threshold", 6.0) > 0


def _layer_kinds(text: PreTrainedConfig, code: Seq[ModuleType]) -> tuple[bool, dict[str, LayerKind]]:
    """Return the masks a model takes, by the rule that transformers uses for compiled forward passes."""
    source = "".join(map(inspect.getsource, code))
    window, chunk = (
        getattr(text, name, None) if name in source or MASK_FUNCTION[kind] in source else None  # else no code reads it
        for name, kind in (("sliding_window", "window"), ("attention_chunk_size", "chunk"))
    )
    of_type = {"sliding_attention": LayerKind(window=window), "chunked_attention": LayerKind(chunk=chunk)}
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        return True, {name: of_type.get(name, LayerKind()) for name in sorted(set(layer_types))}
    if window is not None:
        return False, {"sliding_attention": of_type["sliding_attention"]}
    if chunk is not None:
        return False, {"chunked_attention": of_type["chunked_attention"]}
    return False, {"full_attention": LayerKind()}


def _unmasked(kinds: dict[str, LayerKind], text: PreTrainedConfig, model_class: type) -> LayerKind | None:
    """Return a kind of layer that the config names but that the model's code creates no mask for."""
    if not model_class.__module__.startswith("transformers."):
        return None  # code of another library: the self-check decides
    code = _code(text, model_class)
    for kind in kinds.values():
        for attribute, function in MASK_FUNCTION.items():
            if getattr(kind, attribute) is not None and not any(hasattr(module, function) for module in code):
                return kind
    return None


def _max_positions(text: PreTrainedConfig) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _tree_limit(text: PreTrainedConfig) -> int | None:
    """Return the length where rotary scaling starts to follow the longest position of a forward pass."""
    rope = getattr(text, "rope_parameters", None) or {}
    per_layer = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    limits = [
        parameters.get("original_max_position_embeddings") or _max_positions(text)
        for parameters in per_layer
        if parameters.get("rope_type") in ("dynamic", "longrope")
    ]
    return min((limit for limit in limits if limit), default=None)
