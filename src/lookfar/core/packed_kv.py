"""KV of some positions of a text in a few tensors, so that a copy is one operation and not one for every layer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedKV:
    """Keys and values of all layers; the buffers of one shape are stacked."""

    blocks: tuple[torch.Tensor, ...]  # [buffers, heads, positions, dim] each
    length: int  # positions

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def part(self, start: int, end: int) -> PackedKV:
        """Return some of the positions; they share the memory."""
        return PackedKV(tuple(block[:, :, start:end] for block in self.blocks), end - start)

    def copy(self) -> PackedKV:
        return PackedKV(tuple(block.clone() for block in self.blocks), self.length)

    @staticmethod
    def join(parts: Seq[PackedKV]) -> PackedKV:
        """Return the positions of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        blocks = tuple(torch.cat(same, 2) for same in zip(*(part.blocks for part in parts), strict=True))
        return PackedKV(blocks, sum(part.length for part in parts))


def alike(buffers: Seq[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group buffers, [slots, heads, positions, dim], by their shape, type and device."""
    groups: dict[object, list[torch.Tensor]] = {}
    for buffer in buffers:
        key = buffer.shape, buffer.stride(), buffer.dtype, buffer.device
        groups.setdefault(key, []).append(buffer)
    return list(groups.values())
