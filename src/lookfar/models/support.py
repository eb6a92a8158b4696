"""Which kind of speculation a model supports, and why: read from its config and class, never from its weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import transformers
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from lookfar.errors import ModelError
from lookfar.kvcache.recurrent import is_recurrent
from lookfar.models.alibi import uses_alibi
from lookfar.models.decoder_positions import EMBEDDED, RELATIVE
from lookfar.models.masks import LayerKind

# Where the class of a model is looked up: with images and audio before without, so that nothing is left out.
AUTO_CLASSES = (
    "AutoModelForMultimodalLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
)
# How the drafts of a step are verified: as a tree, as one chain, or not at all (transformers decodes).
Mode = Literal["tree", "chain", "none"]
# Families whose attention ignores the mask or the positions that it is given; a chain needs neither.
CHAIN_FAMILIES = {"gpt_neo": "its local layers measure distance by the index in the cache"}
ONE_TOKEN = "its code continues from a recurrent state with single tokens only"
LIMITED_EXPERTS = "its experts take a limited number of rows of a step, so draft tokens would change the result"
FALLBACK_FAMILIES = {
    "mllama": "its cross-attention layers read the image in every step",
    "nllb-moe": LIMITED_EXPERTS,
    "switch_transformers": LIMITED_EXPERTS,
    "blt": "its patches depend on the tokens around them",
    "doge": "its attention selects keys among all tokens of a step, later ones included",
    "falcon_mamba": ONE_TOKEN,
    "jamba": ONE_TOKEN,
    "mamba": ONE_TOKEN,
    "minimax": "it needs a cache class of its own, whose state cannot be put back",
    "qwen4_exp": "its indexer keeps positions in the cache beside a recurrent state",
    "qwen4_exp_text": "its indexer keeps positions in the cache beside a recurrent state",
    "recurrent_gemma": ONE_TOKEN,
    "zamba": ONE_TOKEN,
    "rwkv": "its recurrent state is not part of the cache, so it cannot be put back",
    "xlstm": "its recurrent state is not part of the cache, so it cannot be put back",
}
BIDIRECTIONAL_PROMPTS = {"paligemma"}
ONE_MASK = {"paligemma"}  # families that take one mask for all layers, though these are of several types
ONE_BY_ONE = {"mpt", "inkling_text"}  # families with a bias by position that is the same for all texts of a step
MASK_FUNCTION = {"window": "create_sliding_window_causal_mask", "chunk": "create_chunked_causal_mask"}
INDEXED_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # the second one in transformers 5.17
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", *INDEXED_TYPES)
STATE_TYPES = {"linear_attention", "conv", "moe", "mlp"}  # layers without attention
HYBRID_TYPES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # attention beside a state


@dataclass(frozen=True)
class Support:
    """The features of a model that speculation depends on. `reason` says why it is not verified with draft trees."""

    model_type: str
    mode: Mode = "tree"
    reason: str = ""
    kinds: dict[str, LayerKind] = field(default_factory=dict)  # of attention, by layer type
    by_layer_type: bool = False  # the model takes one mask for each layer type
    alibi: bool = False
    recurrent: bool = False  # its cache holds state that is put back and replayed after a rejected draft
    counts_padding: bool = False  # positions are counted in the cache, so that padding on the left shifts them
    one_by_one: bool = False  # a forward pass takes one request only
    max_positions: int | None = None  # None: no limit
    encoder_decoder: bool = False
    takes_media: bool = False  # prompts may hold images, audio or video
    first_pass: bool = False  # transformers has to run every prompt: its tokens see later ones, or it has a source
    tree_limit: int | None = None  # drafts are exact up to this length; longer requests use the fallback
    limited_by: str = "rotary scaling"  # what sets in there

    @property
    def why_not_flat(self) -> str:
        """Why the rows of several requests cannot lie side by side; empty if they can."""
        if self.encoder_decoder:
            return "its decoder also reads a source"
        if self.indexed:
            return "its indexer reads the mask"
        return "its attention adds a bias by position" if self.alibi else ""

    @property
    def indexed(self) -> bool:
        """Whether layers choose keys by an indexer, which reads the mask itself."""
        return not self.kinds.keys().isdisjoint(INDEXED_TYPES)

    @property
    def trees(self) -> bool:
        """Whether draft trees can be verified with this model."""
        return self.mode == "tree"

    @property
    def drafts(self) -> bool:
        """Whether drafts can be verified with this model, as trees or as chains."""
        return self.mode != "none"


def examine(config: PreTrainedConfig, model_class: type | None = None) -> Support:
    """Examine a config; raises `ModelError` if it is not one of a causal language model."""
    text = config.get_text_config(decoder=True)
    model_class = model_class or loaded_class(config)[1]
    by_layer_type, kinds = _layer_kinds(text, _code(text, model_class))
    mode, reason = _mode(config, text, model_class, kinds)
    facts: dict[str, Any] = {
        "kinds": kinds,
        "by_layer_type": by_layer_type,
        "alibi": uses_alibi(text),
        "recurrent": mode == "chain" and is_recurrent(config),
        "max_positions": _max_positions(text),
        "encoder_decoder": config.is_encoder_decoder,
        "takes_media": takes_media(config, model_class),
        "first_pass": config.is_encoder_decoder or config.model_type in BIDIRECTIONAL_PROMPTS,
        "tree_limit": _tree_limit(text),
    }
    if config.model_type in ONE_MASK and by_layer_type:
        facts |= {"kinds": {"full_attention": LayerKind()}, "by_layer_type": False, "limited_by": "sliding window"}
        facts["tree_limit"] = text.sliding_window  # up to there, all layers see the same
    facts["counts_padding"] = not (facts["alibi"] or facts["recurrent"] or _takes_positions(model_class))
    facts["one_by_one"] = text.model_type in ONE_BY_ONE or (mode == "chain" and not facts["recurrent"])
    return Support(config.model_type, mode, reason, **facts)


def _code(text: PreTrainedConfig, model_class: type) -> list[ModuleType]:
    """Return the modules that may create the masks of a model: its own, and that of its text model."""
    classes = [model_class]
    if type(text) in MODEL_MAPPING:
        classes.append(MODEL_MAPPING[type(text)])
    return [sys.modules[one.__module__] for one in classes]


def loaded_class(config: PreTrainedConfig) -> tuple[Any, type]:
    """Return the auto class that loads a model of this config, and the class of that model."""
    auto_map = getattr(config, "auto_map", None) or {}
    if any(name in auto_map for name in AUTO_CLASSES):
        raise ModelError(
            f"{config.model_type} brings its own code: "
            "load it with transformers and pass it to lookfar.LM(model, tokenizer)."
        )
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return auto, found[0] if isinstance(found, tuple) else found
    raise ModelError(f"transformers has no language model for {config.model_type!r}: give a model that generates text.")


def _mode(
    config: PreTrainedConfig, text: PreTrainedConfig, model_class: type, kinds: dict[str, LayerKind]
) -> tuple[Mode, str]:
    """Return how drafts are verified, and why not as trees."""
    families = config.model_type, text.model_type
    for family in families:
        if family in FALLBACK_FAMILIES:
            return "none", FALLBACK_FAMILIES[family]
    if _mixes_rows(config):
        return "none", (
            "its 8-bit layers choose outlier columns over all rows of a step, so draft tokens would change the result"
        )
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    if "past_key_values" not in parameters and "cache_params" not in parameters:
        return "none", "it has no KV cache"
    for family in families:
        if family in CHAIN_FAMILIES:
            return "chain", CHAIN_FAMILIES[family]
    takes_positions = _takes_positions(model_class) or uses_alibi(text) or config.model_type in EMBEDDED | RELATIVE
    return _mode_of_cache(config, kinds, model_class, takes_positions)


def _takes_positions(model_class: type) -> bool:
    return "position_ids" in inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]


def _mode_of_cache(
    config: PreTrainedConfig, kinds: dict[str, LayerKind], model_class: type, takes_positions: bool
) -> tuple[Mode, str]:
    """Return how drafts are verified, by the layers of the model's own cache."""
    if is_recurrent(config):
        return "chain", "its recurrent state cannot be rolled back to a branch of a tree"
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer):
            return "none", f"its cache has layers of the type {type(layer).__name__}, which cannot be rolled back"
    others = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()) - set(LAYER_TYPES)
    if others:
        return "none", f"it has layers of the type {min(others)}, which are not ordinary attention"
    if unmasked := _unmasked(kinds, config.get_text_config(decoder=True), model_class):
        return "none", f"its config names a {unmasked} that its attention does not follow"
    if not takes_positions:
        return "chain", "its forward method takes no positions"
    return "tree", ""


def takes_media(config: PreTrainedConfig, model_class: type) -> bool:
    """Whether the prompts of a model may hold images, audio or video."""
    if any(hasattr(config, name) for name in ("vision_config", "audio_config")):
        return True
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
    of_type |= {name: of_type.get(attention, LayerKind()) for name, attention in HYBRID_TYPES.items()}
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        kinds = {name: of_type.get(name, LayerKind()) for name in sorted(set(layer_types) - STATE_TYPES)}
        # Beside a recurrent state, one mask stands for all attention layers.
        alike = len(set(kinds.values())) <= 1 and bool(set(layer_types) & (STATE_TYPES | set(HYBRID_TYPES)))
        return not alike, kinds
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
    if text.model_type in RELATIVE:
        return None
    for name in (
        "max_target_positions",
        "max_decoder_position_embeddings",
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "n_ctx",
    ):
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
