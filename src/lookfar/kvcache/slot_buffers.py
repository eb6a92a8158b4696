"""The buffers of a slot cache, as a transformers cache that writes one padded step at a time."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lookfar.core.arrays import Ints
from lookfar.core.plan import StepPlan
from lookfar.errors import CapacityError

_generations = count()


class SlotBuffers(Cache):
    """Keys and values of all layers, each [slots, heads, capacity + 1, head_dim].

    The last position of a slot takes what padding rows write.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = capacity
        self.generation = next(_generations)  # changes whenever the buffers do
        self.kv_length = 0  # positions that the rows of the step may look at
        self.width = 0  # rows of each request in the step
        self._in_step = slice(0, 0)  # slots
        self._offset: int | None = None  # where the rows of the step go, if it is one place for all requests
        self._positions: Ints = np.zeros((0, 0), np.int64)  # [batch, rows] where they go otherwise
        self._positions_on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int) -> SlotLayer:
        """Return a layer, creating it on first use."""
        while len(self.layers) <= index:
            self.layers.append(SlotLayer(self))
        layer: SlotLayer = self.layers[index]
        return layer

    def tensors(self) -> list[torch.Tensor]:
        """Return all allocated buffers."""
        return [buffer for layer in self.attention() if layer.is_initialized for buffer in (layer.keys, layer.values)]

    def attention(self) -> list[SlotLayer]:
        """Return the layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def resize(self, slots: int, capacity: int) -> None:
        """Make the buffers larger and keep their contents; on a `CapacityError` they are unchanged."""
        layers = self.attention()
        larger = [layer.resized(slots, capacity + 1) for layer in layers]
        for layer, buffers in zip(layers, larger, strict=True):
            if buffers is not None:
                layer.keys, layer.values = buffers
        self.slots, self.capacity, self.generation = slots, capacity, next(_generations)

    def clear(self) -> None:
        """Release all memory."""
        self.layers.clear()
        self.slots, self.capacity, self.generation = 0, 0, next(_generations)

    def begin(self, plan: StepPlan, first_slot: int) -> None:
        """Set where the rows of the next forward pass go: slots `first_slot …`, behind their cached positions."""
        self._in_step = slice(first_slot, first_slot + plan.batch)
        self.width = plan.width
        self.kv_length = int(plan.num_cached.max()) + plan.width
        self._positions_on.clear()
        uniform = bool((plan.num_cached == plan.num_cached[0]).all())
        if uniform and self.kv_length <= self.capacity:
            self._offset = int(plan.num_cached[0])
            return
        self._offset = None
        self._positions = plan.num_cached[:, None] + np.arange(plan.width)
        self._positions[np.arange(plan.width) >= plan.num_rows[:, None]] = self.capacity
        # Padding may reach past the buffers; its keys are masked, so the view simply ends with the buffers.
        self.kv_length = min(self.kv_length, self.capacity + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(layer_idx).update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv_length - self.width  # also before the layers are allocated

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.kv_length, 0

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write the step's rows, [batch, heads, rows, dim], into a buffer; return what the rows may look at."""
        if self._offset is not None:
            buffer[self._in_step, :, self._offset : self._offset + self.width] = states
        else:
            if buffer.device not in self._positions_on:
                slots = torch.arange(self._in_step.start, self._in_step.stop, device=buffer.device)
                self._positions_on[buffer.device] = slots[:, None], torch.from_numpy(self._positions).to(buffer.device)
            slots, positions = self._positions_on[buffer.device]
            buffer[slots, :, positions] = states.transpose(1, 2)
        return buffer[self._in_step, :, : self.kv_length]


class SlotLayer(CacheLayerMixin):
    """The buffers of one layer, allocated with its first keys and values."""

    is_sliding = False

    def __init__(self, cache: SlotBuffers) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._allocate(key_states, value_states, self.cache.slots, self.cache.capacity + 1)
        self.is_initialized = True

    def _allocate(
        self, keys: torch.Tensor, values: torch.Tensor, slots: int, positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate buffers for keys and values like these."""
        try:
            # Zeros, not empty: masked positions still enter the weighted sum, and 0 × NaN is NaN.
            return tuple(  # type: ignore[return-value]
                torch.zeros(slots, like.shape[1], positions, like.shape[3], dtype=like.dtype, device=like.device)
                for like in (keys, values)
            )
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"There is no memory for the KV cache of {slots} requests of {positions} tokens: "
                "lower max_batch, max_length or max_new_tokens."
            ) from error

    def resized(self, slots: int, positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return larger buffers with the same contents; None if there are none yet."""
        if not self.is_initialized:
            return None
        larger = self._allocate(self.keys, self.values, slots, positions)
        for new, old in zip(larger, (self.keys, self.values), strict=True):
            new[: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]  # the last position belongs to padding
        return larger

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.cache.write(self.keys, key_states), self.cache.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.capacity
