"""The buffers of a slot cache, as a transformers cache that writes one padded step at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
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
        return [buffer for layer in self.attention() for buffer in layer.tensors()]

    def attention(self) -> list[SlotLayer]:
        """Return the layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def resize(self, slots: int, capacity: int) -> None:
        """Make the buffers larger and keep their contents; on a `CapacityError` they are unchanged."""
        layers = self.attention()
        larger = [layer.resized(slots, capacity + 1) for layer in layers]
        for layer, buffers in zip(layers, larger, strict=True):
            layer.use(buffers)
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

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return self.layer(layer_idx).update_indexer(indexer_key_states)

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
    """The buffers of one layer, allocated with its first keys and values; an indexer has keys of its own."""

    is_sliding = False
    is_initialized: bool

    def __init__(self, cache: SlotBuffers) -> None:
        super().__init__()
        self.cache = cache
        self.indexer_keys: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the allocated buffers."""
        found = [self.keys, self.values] if self.is_initialized else []
        return found if self.indexer_keys is None else [*found, self.indexer_keys]

    def use(self, buffers: Seq[torch.Tensor]) -> None:
        """Replace the buffers, in the order of `tensors`."""
        own = list(buffers)
        if self.is_initialized:
            self.keys, self.values, *own = own
        if own:
            (self.indexer_keys,) = own

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._allocate([key_states, value_states])
        self.is_initialized = True

    def allocate_like(self, states: Seq[torch.Tensor]) -> None:
        """Allocate buffers for keys, values and perhaps an indexer's keys."""
        self.lazy_initialization(states[0], states[1])
        if len(states) > 2:
            (self.indexer_keys,) = self._allocate(states[2:])

    def _allocate(self, alike: Seq[torch.Tensor], size: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """Allocate buffers for [batch, heads, rows, dim] states like these, with so many slots and positions."""
        slots, positions = size or (self.cache.slots, self.cache.capacity + 1)
        try:
            # Zeros, not empty: masked positions still enter the weighted sum, and 0 × NaN is NaN.
            return [
                torch.zeros(slots, like.shape[1], positions, like.shape[3], dtype=like.dtype, device=like.device)
                for like in alike
            ]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"There is no memory for the KV cache of {slots} requests of {positions} tokens: "
                "lower max_batch, max_length or max_new_tokens."
            ) from error

    def resized(self, slots: int, positions: int) -> list[torch.Tensor]:
        """Return larger buffers with the same contents."""
        larger = self._allocate(self.tensors(), (slots, positions))
        for new, old in zip(larger, self.tensors(), strict=True):
            new[: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]  # the last position belongs to padding
        return larger

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.cache.write(self.keys, key_states), self.cache.write(self.values, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys of an indexer, [batch, rows, dim]; return those that it may look at."""
        states = indexer_key_states[:, None]
        if self.indexer_keys is None:
            (self.indexer_keys,) = self._allocate([states])
        return self.cache.write(self.indexer_keys, states)[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.capacity
