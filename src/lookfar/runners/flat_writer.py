"""The transformers cache through which a flat step writes its keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from lookfar.kernels import reference
from lookfar.kernels.kv_write_op import write_kv
from lookfar.kvcache.slot_buffers import SlotBuffers


class FlatWriter(Cache):
    """Writes flat rows to a slot cache: each row goes to a position of its own, and attention gets whole buffers."""

    def __init__(self, buffers: SlotBuffers, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.buffers = buffers
        self.slots, self.positions = slots, positions
        self.now: tuple[Any, Any] = None, None  # the buffers of the layer that updates next

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():
            self.select_layer(layer_idx, key_states, value_states)
        keys, values = self.now
        fused = torch.compiler.is_compiling() and key_states.shape[2] == 1  # with what precedes
        if fused or keys.device.type == "cpu":  # where the call of an operator takes longer than the write
            reference.write_kv(key_states, value_states, keys, values, self.slots, self.positions)
        else:
            write_kv(key_states, value_states, keys, values, self.slots, self.positions)
        return keys, values

    def select_layer(self, layer_idx: int, key_states: Any = None, value_states: Any = None) -> None:
        """Let the next update be this layer's."""
        layer = self.buffers.layer(layer_idx)
        if key_states is not None and not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        self.now = layer.keys, layer.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and row tables say where a row is
