"""Slots of keys and values: allocated once per layer, written in place, committed in place.

A slot's cell i holds the token at position i once it is committed. A step writes its rows behind the committed cells;
`commit` moves the accepted ones to where they belong. Active sequences always occupy the first slots, so the model
reads a plain slice and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lookfar.arrays import Ints
from lookfar.errors import CapacityError
from lookfar.tree import Plan


class SlotLayer(CacheLayerMixin):
    """One layer's buffers, [slots, heads, cells, head_dim]; the last cell takes what padding rows write."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        cells = self.cache.capacity + 1

        def buffer(states: torch.Tensor) -> torch.Tensor:
            # Zeros, not empty: masked cells still enter the weighted sum, and 0 × NaN is NaN.
            return torch.zeros(
                self.cache.slots, states.shape[1], cells, states.shape[3], dtype=states.dtype, device=states.device
            )

        try:
            self.keys, self.values = buffer(key_states), buffer(value_states)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"There is no memory for the keys and values of {self.cache.slots} sequences of {cells} tokens: "
                "lower max_batch, max_length or max_new_tokens."
            ) from error
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.cache.write(self.keys, key_states), self.cache.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.kv_length, 0

    def get_seq_length(self) -> int:
        return self.cache.kv_length - self.cache.width

    def get_max_length(self) -> int:
        return self.cache.capacity


class SlotCache(Cache):
    """The keys and values of up to `slots` sequences of up to `capacity` cells each."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = capacity
        self._slots_in_step = slice(0, 0)
        self._offset: int | None = None  # where all rows of the step go, if it is one place for all sequences
        self._cells: Ints = np.zeros((0, 0), np.int64)  # [batch, rows] otherwise
        self._cells_on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._moves: dict[int, tuple[Ints, Ints]] = {}  # slot → cells to move, and where to
        self.copy_cells: Callable[[int, int, int], None] | None = None  # a faster way to copy a slot, if there is one
        self.kv_length = 0
        self.width = 0

    def begin(self, plan: Plan) -> None:
        """Say where the rows of the coming forward go."""
        self.settle()
        self._slots_in_step = slice(plan.first_slot, plan.first_slot + plan.batch)
        self.kv_length, self.width = plan.kv_length, plan.width
        self._cells_on.clear()
        uniform = bool((plan.cached == plan.cached[0]).all())
        if uniform and self.kv_length <= self.capacity:
            self._offset = int(plan.cached[0])
            return
        self._offset = None
        self._cells = plan.cached[:, None] + np.arange(plan.width)
        self._cells[np.arange(plan.width) >= plan.rows[:, None]] = self.capacity
        # Padding may reach past the buffers; those keys are masked, so the view simply ends with them.
        self.kv_length = min(self.kv_length, self.capacity + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> SlotLayer:
        """A layer, made when it is first asked for."""
        while len(self.layers) <= index:
            self.layers.append(SlotLayer(self))
        layer: SlotLayer = self.layers[index]
        return layer

    def write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Put the step's rows ([batch, heads, rows, dim]) into a layer's buffer; return what the rows may look at."""
        if self._offset is not None:
            buffer[self._slots_in_step, :, self._offset : self._offset + self.width] = states
        else:
            if buffer.device not in self._cells_on:
                slots = torch.arange(self._slots_in_step.start, self._slots_in_step.stop, device=buffer.device)
                self._cells_on[buffer.device] = slots[:, None], torch.from_numpy(self._cells).to(buffer.device)
            slots, cells = self._cells_on[buffer.device]
            buffer[slots, :, cells] = states.transpose(1, 2)
        return buffer[self._slots_in_step, :, : self.kv_length]

    def commit(self, slot: int, start: int, rows: Seq[int]) -> None:
        """Keep the cells `start + rows` of a slot as `start, start + 1, …`. Done before anybody reads them."""
        if not rows or rows[-1] == len(rows) - 1:
            return  # rows ascend, so all are where they belong
        moved = [(start + row, start + place) for place, row in enumerate(rows) if row != place]
        source, target = np.array(moved, dtype=np.int64).T
        self._moves[slot] = source, target

    def claim(self, slot: int, most: int) -> tuple[Ints, Ints] | None:
        """Take over what is to be moved in a slot, from which cells and to which, if it is not too much."""
        if slot in self._moves and len(self._moves[slot][0]) > most:
            self.settle()
        return self._moves.pop(slot, None)

    def settle(self) -> None:
        """Do all moves that are still to be done."""
        for slot, (source, target) in self._moves.items():
            for layer in self.layers:
                if layer.is_initialized:
                    for buffer in (layer.keys, layer.values):
                        read, write = (torch.from_numpy(cells).to(buffer.device) for cells in (source, target))
                        buffer[slot, :, write] = buffer[slot, :, read]
        self._moves.clear()

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot the first `length` cells of another one, and what is still to be moved among them."""
        self._moves.pop(target, None)
        if source in self._moves:
            self._moves[target] = self._moves[source]
            length = max(length, int(self._moves[source][0].max()) + 1)
        if self.copy_cells is not None:
            self.copy_cells(source, target, length)
            return
        for layer in self.layers:
            if layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    buffer[target, :, :length] = buffer[source, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """The same for a slot that is given up."""
        self.copy(source, target, length)
        self._moves.pop(source, None)

    def load(self, slot: int, past: Cache) -> int:
        """Fill a slot from a plain cache of one sequence; returns how many tokens that were."""
        self.settle()
        for index, layer in enumerate(past.layers):
            if layer.is_initialized and layer.keys.shape[-2]:
                length = layer.keys.shape[-2]
                own = self.layer(index)
                if not own.is_initialized:
                    own.lazy_initialization(layer.keys, layer.values)
                own.keys[slot, :, :length], own.values[slot, :, :length] = layer.keys[0], layer.values[0]
        return int(past.get_seq_length())

    def take(self, slot: int, start: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A copy of some cells of every layer, each [1, heads, cells, head_dim]."""
        self.settle()
        cells = slice(start, end)
        return [
            (layer.keys[slot, None, :, cells].clone(), layer.values[slot, None, :, cells].clone())
            for layer in self.layers
        ]

    def grown(self, slots: int, capacity: int) -> SlotCache:
        """A larger cache with the same contents. This one has none after that, and its memory is free."""
        self.settle()
        larger = SlotCache(slots, capacity)
        for layer in self.layers:
            copy = SlotLayer(larger)
            if layer.is_initialized:
                copy.lazy_initialization(layer.keys, layer.values)
                for new, old in ((copy.keys, layer.keys), (copy.values, layer.values)):
                    new[: self.slots, :, : self.capacity] = old[:, :, : self.capacity]
            larger.layers.append(copy)
        self.clear()
        return larger

    def clear(self) -> None:
        """Give the memory back. Layers know their cache, so it would wait for the garbage collector otherwise."""
        self.layers.clear()
        self._moves.clear()
        self.copy_cells = None

    @property
    def nbytes(self) -> int:
        """Memory held by the buffers."""
        return sum(b.nbytes for layer in self.layers if layer.is_initialized for b in (layer.keys, layer.values))
