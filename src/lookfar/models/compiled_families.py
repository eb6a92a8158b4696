"""Families of models whose layers can be run as compiled code: plain Llama-like decoders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from lookfar.kernels.cpu import layout
from lookfar.kernels.cpu.vectors import HAS_FMA, LANES

# Families whose code the compiled step repeats, by the names of their classes.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
PARTS = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
PLACES = {  # of the packed weights of a layer; those of queries, keys and values are one matrix
    "self_attn.q_proj": layout.QKV,
    "self_attn.k_proj": None,
    "self_attn.v_proj": None,
    "self_attn.o_proj": layout.OUT,
    "mlp.gate_proj": layout.GATE,
    "mlp.up_proj": layout.UP,
    "mlp.down_proj": layout.DOWN,
}
MATRICES = [column for column in PLACES.values() if column is not None]
VECTORS = {  # of a layer, which are read where they are
    "input_layernorm.weight": layout.NORM,
    "post_attention_layernorm.weight": layout.MLP_NORM,
    "self_attn.q_norm.weight": layout.Q_NORM,
    "self_attn.k_norm.weight": layout.K_NORM,
    "self_attn.q_proj.bias": layout.Q_BIAS,
    "self_attn.k_proj.bias": layout.K_BIAS,
    "self_attn.v_proj.bias": layout.V_BIAS,
}


def why_no_compiler() -> str:
    """Return why no steps are compiled in this process; empty if they are."""
    return "" if HAS_FMA else "the processor has no fused multiply-add (AVX2 or NEON)"


def why_not_compiled(model: PreTrainedModel) -> str:
    """Return why the layers of a model are left to torch; empty if they can be run as compiled code."""
    if why := why_no_compiler():
        return why
    if not _family(model):
        return "its family has no compiled step"
    if any(type(module) not in allowed for module, allowed in _parts(model)) or not all(
        map(_is_plain, model.modules())
    ):
        return "its modules are not those of its family, or have hooks"
    if not all(_is_float32(weight) for weight in model.parameters()):
        return "its weights are not float32 matrices on a CPU"
    return _why_not_these_sizes(model)


def _family(model: PreTrainedModel) -> tuple[type, ...]:
    """Return the classes of the parts of a model; none if its family has no compiled step."""
    for family, name in FAMILIES.items():
        code = f"transformers.models.{family}.modeling_{family}"
        if (type(model).__module__, type(model).__name__) == (code, f"{name}ForCausalLM"):
            return tuple(getattr(sys.modules[code], name + part) for part in PARTS)
    return ()


def replaced_methods(model: PreTrainedModel) -> list[object]:
    """Return the forward methods of modules that were replaced, in models whose steps could be compiled."""
    if not _family(model):
        return []
    return [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]


def _is_plain(module: nn.Module) -> bool:
    own = module.__dict__
    return not ("forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"])


def _is_float32(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()


def _parts(model: Any) -> Iterator[tuple[nn.Module, tuple[type, ...]]]:
    """Yield the modules of a model that the compiled step replaces, each with the classes that it may have."""
    decoder_class, layer, attention, mlp, norm = _family(model)
    yield model.model, (decoder_class,)
    yield model.model.norm, (norm,)
    yield model.model.embed_tokens, (nn.Embedding,)
    yield model.lm_head, (nn.Linear,)
    for block in model.model.layers:
        yield block, (layer,)
        yield block.self_attn, (attention,)
        yield block.mlp, (mlp,)
        yield block.mlp.act_fn, (nn.SiLU, type(ACT2FN["silu"]))
        for name, module in block.named_modules():
            if name in PLACES:
                yield module, (nn.Linear,)
            elif name.endswith("norm"):
                yield module, (norm,)


def linears(model: Any) -> list[nn.Linear]:
    """Return the linear layers in the order in which their weights are packed."""
    return [linear for _, linear in _named(model)]


def _why_not_these_sizes(model: Any) -> str:
    blocks, named = model.model.layers, list(_named(model))
    if len(blocks) != model.config.num_hidden_layers or not len(blocks):
        return "it has other layers than its config says"
    if any("weight" not in linear._parameters for _, linear in named):
        return "its weights are computed"
    if any(linear.bias is not None for name, linear in named if f"{name}.bias" not in VECTORS):
        return "its output, MLP or head layers have biases"
    shapes = {(name, *linear.weight.shape) for name, linear in named}
    epsilons = {getattr(module, "variance_epsilon", None) for module in model.modules()} - {None}
    scales = {(block.self_attn.scaling, block.self_attn.head_dim) for block in blocks}
    if len(shapes) > len(PLACES) + 1 or len(epsilons) > 1 or len(scales) > 1:
        return "its layers differ"
    if len({id(linear) for _, linear in named}) < len(named):
        return "its layers share weights"
    sizes = [blocks[0].self_attn.head_dim, *(size for name, *shape in shapes if name in PLACES for size in shape)]
    if any(size % LANES for size in sizes):
        return f"its sizes are no multiples of {LANES}"
    if model.model.embed_tokens.max_norm is not None:
        return "its embeddings are normalised in use"
    if any(block.training and block.self_attn.attention_dropout for block in blocks):
        return "it is in training mode and has dropout"
    return ""


def _named(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    for block in model.model.layers:
        yield from ((name, block.get_submodule(name)) for name in PLACES)
    yield "lm_head", model.lm_head
