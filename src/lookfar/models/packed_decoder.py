"""The weights of a Llama-like decoder on a CPU, packed for the compiled step of `kernels/cpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from lookfar.core.arrays import Ints
from lookfar.kernels.cpu import layout
from lookfar.kernels.cpu.formats import NAMES
from lookfar.models.compiled_families import MATRICES, VECTORS, linears
from lookfar.models.masks import LayerKind
from lookfar.models.packed_matrix import PackedMatrix, choose_formats, grouped, pack_matrices, size_of
from lookfar.models.weight_changes import WeightState, version_of


class PackedDecoder:
    """The packed weights of a model, and the table by which compiled code finds them.

    They are one piece of memory until a matrix gets another format.
    """

    def __init__(self, model: Any, kinds: Mapping[str, LayerKind]) -> None:
        self.model = model
        self._kinds = list(kinds)
        self._sizes: list[tuple[int, ...]] = []
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
        self._parameters: list[dict[str, Any]] = [layer._parameters for layer in self.layers]
        self._vectors = list(_vectors(blocks))
        self._pointers: list[int] = []  # of the vectors, when they were last written to the table
        sizes = [tuple(layer.weight.shape) for layer in self.layers]
        if sizes != self._sizes:
            self._sizes = sizes
            self._matrices: list[PackedMatrix] = []  # made when the first weight is packed
            self._states: list[WeightState | None] = [None] * len(self.layers)
            self._packed_from: tuple[list[int], list[int]] = [], []  # the addresses and versions of all weights
            self._table = np.zeros((len(blocks), layout.LAYER_COLUMNS), np.int64)
            types = getattr(self.model.config, "layer_types", None) or self._kinds[:1] * len(blocks)
            self._table[:, layout.KIND] = [self._kinds.index(name) for name in types[: len(blocks)]]
        for matrix, group in zip(self._matrices, grouped(self.layers), strict=False):
            matrix.layers = group

    @property
    def num_layers(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """The memory that the packed copies take, or will take as far as some of their rows tell."""
        if self._matrices:
            return sum(len(matrix.memory) for matrix in self._matrices)
        return sum(size_of(group, kind) for group, kind in choose_formats(self.layers))

    @property
    def formats(self) -> dict[str, int]:
        """The bytes in each format."""
        found: dict[str, int] = {}
        for matrix in self._matrices:
            found[NAMES[matrix.kind]] = found.get(NAMES[matrix.kind], 0) + len(matrix.memory)
        return found

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
        weights = [own["weight"] for own in self._parameters]
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
        if not self._matrices:
            self._matrices = pack_matrices(self.layers)
        (matrix,) = (one for one in self._matrices if layer in one.layers)
        # As the weights were before they were copied: a change meanwhile is seen at the next look.
        states = {one: WeightState.of(one.weight) for one in matrix.layers}
        for packed in matrix.write(layer):
            self._states[self._places[packed]] = states[packed]
        if known := [state for state in self._states if state is not None]:
            self._packed_from = [state.address for state in known], [state.version for state in known]
        self._write_places()

    def _write_places(self) -> None:
        """Write the addresses and formats of all matrices but the head to the table."""
        parts, count = self._matrices[:-1], len(MATRICES)
        self._table[:, :count] = np.reshape([part.address for part in parts], (-1, count))
        self._table[:, layout.FORMATS : layout.FORMATS + count] = np.reshape([part.kind for part in parts], (-1, count))

    @property
    def head(self) -> tuple[int, int]:
        """The address and the format of the head."""
        return self._matrices[-1].address, self._matrices[-1].kind

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
