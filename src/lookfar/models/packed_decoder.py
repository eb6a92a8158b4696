"""The weights of a Llama-like decoder on a CPU, packed for the compiled step of `kernels/cpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lookfar.core.arrays import Floats, Ints
from lookfar.kernels.cpu import layout
from lookfar.kernels.cpu.vectors import LANES
from lookfar.models.compiled_families import PLACES, VECTORS, linears
from lookfar.models.masks import LayerKind
from lookfar.models.weight_changes import WeightState, version_of


class PackedDecoder:
    """The packed weights of a model, in one piece of memory, and the table by which compiled code finds them."""

    def __init__(self, model: Any, kinds: Mapping[str, LayerKind]) -> None:
        self.model = model
        self._kinds = list(kinds)
        self._sizes: list[int] = []
        self.find_layers()

    def find_layers(self) -> None:
        """Follow changes of the model's modules."""
        blocks = self.model.model.layers
        attention, mlp = blocks[0].self_attn, blocks[0].mlp
        self.head_dim: int = attention.head_dim
        self.heads, self.kv_heads = (
            part.weight.shape[0] // self.head_dim for part in (attention.q_proj, attention.k_proj)
        )
        self.inner, self.hidden = mlp.gate_proj.weight.shape
        self.vocab_size: int = self.model.lm_head.weight.shape[0]
        self.constants = np.float32(self.model.model.norm.variance_epsilon), np.float32(attention.scaling)
        self.layers = linears(self.model)
        self._places = {layer: index for index, layer in enumerate(self.layers)}
        # Where modules keep their weights: reading them there takes a tenth of the time of an attribute.
        self._matrices: list[dict[str, Any]] = [layer._parameters for layer in self.layers]
        self._vectors = list(_vectors(blocks))
        self._pointers: list[int] = []  # of the vectors, when they were last written to the table
        sizes = [_packed_size(layer.weight) for layer in self.layers]
        if sizes != self._sizes:
            self._sizes = sizes
            self._memory: Floats = np.empty(0, np.float32)  # allocated when the first weight is packed
            self._states: list[WeightState | None] = [None] * len(self.layers)
            self._packed_from: tuple[list[int], list[int]] = [], []  # the addresses and versions of all weights
            self._table = np.zeros((len(blocks), layout.LAYER_COLUMNS), np.int64)
            types = getattr(self.model.config, "layer_types", None) or self._kinds[:1] * len(blocks)
            self._table[:, layout.KIND] = [self._kinds.index(name) for name in types[: len(blocks)]]

    @property
    def num_layers(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """The memory that the packed copies take, or will take."""
        return 4 * sum(self._sizes)

    def refresh(self, everything: bool = False) -> bool:
        """Drop packed copies of weights that have changed, or all. Returns whether there were any."""
        dropped = False
        for index, layer in enumerate(self.layers):
            state = self._states[index]
            if state is not None and (everything or state != WeightState.of(layer.weight)):
                self._states[index], self._packed_from, dropped = None, ([], []), True
        return dropped

    @property
    def missing(self) -> list[nn.Linear]:
        """Layers whose weights are not packed, or have changed as far as torch knows."""
        weights = [own["weight"] for own in self._matrices]
        pointers, versions = [weight.data_ptr() for weight in weights], list(map(version_of, weights))
        if (pointers, versions) == self._packed_from:
            return []
        return [
            layer
            for layer, weight, state in zip(self.layers, weights, self._states, strict=True)
            if state is None or not state.may_be_of(weight)
        ]

    def pack(self, layer: nn.Linear) -> None:
        """Pack the weight of a layer."""
        if not len(self._memory):
            self._memory = aligned(sum(self._sizes))
            starts = self._starts[:-1].reshape(-1, len(PLACES))
            for part, column in enumerate(PLACES.values()):
                if column is not None:
                    self._table[:, column] = starts[:, part]
        index, weight = self._places[layer], layer.weight
        place = sum(self._sizes[:index])
        self._states[index] = WeightState.of(weight)
        if states := [state for state in self._states if state is not None]:
            self._packed_from = [state.address for state in states], [state.version for state in states]
        write_panels(weight.detach(), self._memory[place : place + self._sizes[index]])

    @property
    def _starts(self) -> Ints:
        """The addresses of the packed weights."""
        return self._memory.ctypes.data + 4 * np.cumsum([0, *self._sizes[:-1]])

    @property
    def head_address(self) -> int:
        return int(self._memory.ctypes.data) + 4 * (len(self._memory) - self._sizes[-1])

    @property
    def final_norm_address(self) -> int:
        return int(self.model.model.norm.weight.data_ptr())

    def table(self) -> Ints:
        """Return the addresses of all weights, [layers, columns]; the caller fills in those of the KV buffers."""
        pointers = [own[name].data_ptr() for _, _, own, name in self._vectors]
        if pointers != self._pointers:
            rows, columns, _, _ = zip(*self._vectors, strict=True)
            self._table[rows, columns] = self._pointers = pointers
        return self._table


def _vectors(blocks: Any) -> Any:
    """Yield the vectors of all layers: their place in the table, and the dictionary and name of their parameter."""
    for row, block in enumerate(blocks):
        known = {name: (module._parameters, parameter) for name, module, parameter in _parameters(block)}
        for name, column in VECTORS.items():
            if name in known:
                yield row, column, *known[name]


def _parameters(block: nn.Module) -> Any:
    for prefix, module in block.named_modules():
        yield from ((f"{prefix}.{name}", module, name) for name, own in module._parameters.items() if own is not None)


def _packed_size(weight: torch.Tensor) -> int:
    return -(-weight.shape[0] // LANES) * LANES * weight.shape[1]


def write_panels(weight: torch.Tensor, to: Floats) -> None:
    """Write a matrix as panels of 16 of its rows, [panel][column][16]; the last panel is filled up with zeros."""
    rows, columns = weight.shape
    panels, whole = torch.from_numpy(to).view(-1, columns, LANES), rows // LANES
    panels[:whole] = weight[: whole * LANES].view(whole, LANES, columns).transpose(1, 2)
    if whole < len(panels):
        panels[whole] = 0.0
        panels[whole, :, : rows - whole * LANES] = weight[whole * LANES :].t()


def aligned(count: int) -> Floats:
    """Return uninitialised floats that begin at a multiple of 64 bytes. NumPy asks for huge pages, torch does not."""
    memory = np.empty(count + LANES, np.float32)
    first = -memory.ctypes.data // 4 % LANES
    return memory[first : first + count]
