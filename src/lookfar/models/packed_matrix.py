"""One packed matrix of a decoder: the weights of a product, in the smallest format that holds them without loss."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from torch import nn

from lookfar.kernels.cpu.formats import Bytes, format_of, packed_size, write_panels
from lookfar.models.compiled_families import PLACES

ALIGNMENT = 64
SAMPLED_ROWS = 32  # of each matrix, to choose its format


class PackedMatrix:
    """The weights of linear layers with one input, one behind the other, in one format."""

    def __init__(self, layers: Seq[nn.Linear], kind: int, memory: Bytes) -> None:
        self.layers, self.kind, self.memory = layers, kind, memory

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def write(self, layer: nn.Linear) -> list[nn.Linear]:
        """Pack the weight of a layer; returns the layers whose weights were packed.

        If a weight needs another format than expected, the matrix gets other memory and keeps that format.
        """
        if self._write(layer):
            return [layer]
        kind = format_of([one.weight for one in self.layers])
        self.kind, self.memory = kind, aligned(size_of(self.layers, kind))
        return [one for one in self.layers if self._write(one)]

    def _write(self, layer: nn.Linear) -> bool:
        place = self.layers.index(layer)
        first, last = size_of(self.layers[:place], self.kind), size_of(self.layers[: place + 1], self.kind)
        return write_panels(layer.weight, self.kind, self.memory[first:last])


def pack_matrices(layers: Seq[nn.Linear]) -> list[PackedMatrix]:
    """Choose the formats of all matrices of a decoder, and give them one piece of memory, which is not written yet."""
    chosen = choose_formats(layers)
    ends = np.cumsum([size_of(group, kind) for group, kind in chosen])
    memory = aligned(int(ends[-1]))
    return [PackedMatrix(*one, part) for one, part in zip(chosen, np.split(memory, ends[:-1]), strict=True)]


def choose_formats(layers: Seq[nn.Linear]) -> list[tuple[list[nn.Linear], int]]:
    """Return the layers of each matrix and the format that some of their rows fit."""
    groups = grouped(layers)
    return [(group, format_of([layer.weight.detach() for layer in group], SAMPLED_ROWS)) for group in groups]


def grouped(layers: Seq[nn.Linear]) -> list[list[nn.Linear]]:
    """Return the layers of each matrix: those of queries, keys and values are one. `layers` are all, and the head."""
    groups: list[list[nn.Linear]] = []
    columns = list(PLACES.values())
    for index, layer in enumerate(layers):
        if index < len(layers) - 1 and columns[index % len(columns)] is None:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


def size_of(layers: Seq[nn.Linear], kind: int) -> int:
    return sum(packed_size(layer.weight, kind) for layer in layers)


def aligned(count: int) -> Bytes:
    """Return uninitialised bytes that begin at a multiple of 64. NumPy asks for huge pages, torch does not."""
    memory = np.empty(count + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + count]
