"""The weights of a Llama-like decoder on a CPU, packed for the compiled step of `kernels/cpu`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from lookfar.core.arrays import Floats, Ints
from lookfar.kernels.cpu import decoder
from lookfar.kernels.cpu.vectors import LANES
from lookfar.models.masks import LayerKind
from lookfar.models.weight_changes import WeightState

# The classes whose code the compiled step repeats.
FAMILIES = {
    getattr(code, f"{name}ForCausalLM"): tuple(
        getattr(code, name + part) for part in ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
    )
    for code, name in ((llama, "Llama"), (mistral, "Mistral"), (qwen2, "Qwen2"), (qwen3, "Qwen3"))
}
PLACES = {  # of the packed weights of a layer; those of queries, keys and values lie behind each other
    "self_attn.q_proj": decoder.QKV,
    "self_attn.k_proj": None,
    "self_attn.v_proj": None,
    "self_attn.o_proj": decoder.OUT,
    "mlp.gate_proj": decoder.GATE,
    "mlp.up_proj": decoder.UP,
    "mlp.down_proj": decoder.DOWN,
}
VECTORS = {  # of a layer, which are read where they are
    "input_layernorm.weight": decoder.NORM,
    "post_attention_layernorm.weight": decoder.MLP_NORM,
    "self_attn.q_norm.weight": decoder.Q_NORM,
    "self_attn.k_norm.weight": decoder.K_NORM,
    "self_attn.q_proj.bias": decoder.Q_BIAS,
    "self_attn.k_proj.bias": decoder.K_BIAS,
    "self_attn.v_proj.bias": decoder.V_BIAS,
}


def why_not_compiled(model: PreTrainedModel) -> str:
    """Return why the layers of a model are left to torch; empty if they can be run as compiled code."""
    if type(model) not in FAMILIES:
        return "its family has no compiled step"
    if any(type(module) not in allowed for module, allowed in _parts(model)) or not all(map(_is_plain, model.modules())):
        return "its modules are not those of its family, or have hooks"
    if not all(_is_float32(weight) for weight in model.parameters()):
        return "its weights are not float32 matrices on a CPU"
    return _why_not_these_sizes(model)


def _is_plain(module: nn.Module) -> bool:
    own = module.__dict__
    return not ("forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"])


def _is_float32(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()


def _parts(model: Any) -> Iterator[tuple[nn.Module, tuple[type, ...]]]:
    """Yield the modules of a model that the compiled step replaces, each with the classes that it may have."""
    decoder_class, layer, attention, mlp, norm = FAMILIES[type(model)]
    yield model.model, (decoder_class,)
    yield model.model.norm, (norm,)
    yield model.model.embed_tokens, (nn.Embedding,)
    yield model.lm_head, (nn.Linear,)
    for block in model.model.layers:
        yield block, (layer,)
        yield block.self_attn, (attention,)
        yield block.mlp, (mlp,)
        yield block.mlp.act_fn, (nn.SiLU, SiLUActivation)
        for name, module in block.named_modules():
            if name in PLACES:
                yield module, (nn.Linear,)
            elif name.endswith("norm"):
                yield module, (norm,)


def _linears(model: Any) -> list[nn.Linear]:
    """Return the linear layers in the order in which their weights are packed."""
    return [block.get_submodule(name) for block in model.model.layers for name in PLACES] + [model.lm_head]


def _why_not_these_sizes(model: Any) -> str:
    blocks, linears = model.model.layers, _linears(model)
    if len(blocks) != model.config.num_hidden_layers or not len(blocks):
        return "it has other layers than its config says"
    if any("weight" not in linear._parameters for linear in linears):
        return "its weights are computed"
    shapes = {tuple(tuple(linear.weight.shape) for linear in linears[i : i + len(PLACES)])
              for i in range(0, len(linears) - 1, len(PLACES))}
    epsilons = {getattr(module, "variance_epsilon", None) for module in model.modules()} - {None}
    if len(shapes) > 1 or len(epsilons) > 1:
        return "its layers differ"
    if any(linear.bias is not None for name, linear in _named(model) if f"{name}.bias" not in VECTORS):
        return "its output, MLP or head layers have biases"
    sizes = [blocks[0].self_attn.head_dim, *(size for shape in next(iter(shapes)) for size in shape)]
    if any(size % LANES for size in sizes):
        return f"its sizes are no multiples of {LANES}"
    if any(block.training and block.self_attn.attention_dropout for block in blocks):
        return "it is in training mode and has dropout"
    return ""


def _named(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    for block in model.model.layers:
        yield from ((name, block.get_submodule(name)) for name in PLACES)
    yield "lm_head", model.lm_head


class PackedDecoder:
    """The packed weights of a model, in one piece of memory, and the table by which compiled code finds them."""

    def __init__(self, model: Any, kinds: Mapping[str, LayerKind]) -> None:
        self.model = model
        self._kinds = list(kinds)
        self._sizes: list[int] = []
        self._find_layers()

    def _find_layers(self) -> None:
        blocks = self.model.model.layers
        attention, mlp = blocks[0].self_attn, blocks[0].mlp
        self.head_dim: int = attention.head_dim
        self.heads, self.kv_heads = (
            part.weight.shape[0] // self.head_dim for part in (attention.q_proj, attention.k_proj)
        )
        self.inner, self.hidden = mlp.gate_proj.weight.shape
        self.constants = np.float32(self.model.model.norm.variance_epsilon), np.float32(attention.scaling)
        self.layers = _linears(self.model)
        self._vectors = [
            (row, column, block.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2])
            for row, block in enumerate(blocks)
            for name, column in VECTORS.items()
            if name in dict(block.named_parameters())
        ]
        sizes = [_packed_size(layer.weight) for layer in self.layers]
        if sizes != self._sizes:
            self._sizes = sizes
            self._memory: Floats = np.empty(0, np.float32)  # allocated when the first weight is packed
            self._states: list[WeightState | None] = [None] * len(self.layers)
            self._table = np.zeros((len(blocks), decoder.COLUMNS), np.int64)
            types = getattr(self.model.config, "layer_types", None) or self._kinds[:1] * len(blocks)
            self._table[:, decoder.KIND] = [self._kinds.index(name) for name in types]

    @property
    def vocab_size(self) -> int:
        return int(self.model.lm_head.weight.shape[0])

    @property
    def nbytes(self) -> int:
        """The memory that the packed copies take, or will take."""
        return 4 * sum(self._sizes)

    def refresh(self, everything: bool = False) -> bool:
        """Follow changes of the model: drop packed copies of weights that have changed, or all.

        Returns whether there were any.
        """
        before, dropped = self._memory, False
        self._find_layers()
        if self._memory is not before:
            return True
        for index, layer in enumerate(self.layers):
            state = self._states[index]
            if state is not None and (everything or state != WeightState.of(layer.weight)):
                self._states[index], dropped = None, True
        return dropped

    @property
    def missing(self) -> list[int]:
        """Layers whose weights are not packed, or have changed as far as torch knows."""
        return [
            index
            for index, (layer, state) in enumerate(zip(self.layers, self._states, strict=True))
            if state is None or not state.may_be_of(layer.weight)
        ]

    def pack(self, index: int) -> None:
        """Pack the weight of a layer."""
        if not len(self._memory):
            self._memory = _aligned(sum(self._sizes))
            starts = self._addresses[:-1].reshape(-1, len(PLACES))
            for part, column in enumerate(PLACES.values()):
                if column is not None:
                    self._table[:, column] = starts[:, part]
        weight, place = self.layers[index].weight, sum(self._sizes[:index])
        self._states[index] = WeightState.of(weight)
        _write_panels(weight.detach(), self._memory[place : place + self._sizes[index]])

    def table(self) -> Ints:
        """Return the addresses of all weights, [layers, columns]; the caller fills in those of the KV buffers."""
        for row, column, parameters, name in self._vectors:
            vector = parameters[name]
            assert vector is not None
            self._table[row, column] = vector.data_ptr()
        return self._table

    @property
    def head_address(self) -> int:
        return int(self._addresses[-1])

    @property
    def _addresses(self) -> Ints:
        """Where the packed weight of each layer begins."""
        return self._memory.ctypes.data + 4 * np.cumsum([0, *self._sizes[:-1]])


def _packed_size(weight: torch.Tensor) -> int:
    return -(-weight.shape[0] // LANES) * LANES * weight.shape[1]


def _write_panels(weight: torch.Tensor, to: Floats) -> None:
    """Write a matrix as panels of 16 of its rows, [panel][column][16]; the last panel is filled up with zeros."""
    rows, columns = weight.shape
    panels, whole = torch.from_numpy(to).view(-1, columns, LANES), rows // LANES
    panels[:whole] = weight[: whole * LANES].view(whole, LANES, columns).transpose(1, 2)
    if whole < len(panels):
        panels[whole] = 0.0
        panels[whole, :, : rows - whole * LANES] = weight[whole * LANES :].t()


def _aligned(count: int) -> Floats:
    """Return uninitialised floats that begin at a multiple of 64 bytes. NumPy asks for huge pages, torch does not."""
    memory = np.empty(count + LANES, np.float32)
    first = -memory.ctypes.data // 4 % LANES
    return memory[first : first + count]
