"""A KV cache of slots: one preallocated buffer per layer, written in place, committed in place.

A slot's position i holds the token at position i once it is committed. A step writes row r of a request at the slot's
position `length + r`; `commit` moves the accepted rows to where they belong. Active requests occupy the first slots, so
a model reads a slice of the buffers and nothing is copied. Captured steps find their slots by number, so for them a
request that ends may leave a gap, which the next request fills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from transformers import Cache

from lookfar.core.arrays import Ints
from lookfar.core.ids import common_prefix
from lookfar.core.packed_kv import PackedKV, alike
from lookfar.core.plan import StepPlan
from lookfar.errors import CapacityError
from lookfar.kvcache.base import KVCache, KVHandle, KVState
from lookfar.kvcache.slot_buffers import SlotBuffers, SlotLayer

# (slots, length, most slots) → the slots and the length to allocate.
Sizing = Callable[[int, int, int], tuple[int, int]]
Moves = Mapping[int, tuple[Seq[int], Seq[int]]]  # slot → positions to move, ascending, and where to
GAP = -1  # in place of a handle
ROUNDED = 64  # lengths are rounded up to a multiple of this


def exact_size(slots: int, length: int, most: int) -> tuple[int, int]:
    """Return the requested size, with the length rounded up."""
    return slots, -(-length // ROUNDED) * ROUNDED


class Mover(Protocol):
    """Moves and copies positions in all buffers with few operations."""

    def apply(self, moves: Moves) -> None:
        """Carry out moves."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another one."""

    def pack(self, slot: int, start: int, end: int) -> PackedKV:
        """Copy positions out of a slot."""

    def unpack(self, slot: int, kv: PackedKV) -> None:
        """Copy KV into the first positions of a slot."""


class SlotKVCache(KVCache):
    """Slots for a number of requests of up to a number of positions each."""

    keeps_accepted = True
    shares_prefixes = True

    def __init__(
        self, slots: int = 0, capacity: int = 0, sizing: Sizing = exact_size, leaves_gaps: bool = False
    ) -> None:
        self.buffers = SlotBuffers(slots, capacity)
        self.mover: Mover | None = None  # for the buffers as they are, if there is one
        self.sizing = sizing
        self._leaves_gaps = leaves_gaps
        self._handles: list[KVHandle] = []  # by slot; `GAP` where a request has ended
        self._num_gaps = 0
        self._lengths: list[int] = []  # committed positions, by slot
        self._slot_of: dict[KVHandle, int] = {}
        self.next_handle = 0
        self._retained: dict[int, list[int]] = {}  # free slot → the text of the positions that it still holds
        self._moves: dict[int, tuple[list[int], range]] = {}  # that are noted, by slot

    @property
    def slots(self) -> int:
        return self.buffers.slots

    @property
    def capacity(self) -> int:
        return self.buffers.capacity

    @property
    def order(self) -> Seq[KVHandle]:
        return [handle for handle in self._handles if handle != GAP] if self._num_gaps else self._handles

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.tensors())

    def slot_of(self, handle: KVHandle) -> int:
        return self._slot_of[handle]

    def reserve(self, requests: int, length: int, *, most: int, keep: bool) -> None:
        buffers = self.buffers
        if requests <= buffers.slots and length <= buffers.capacity:
            return
        if not keep:
            self._clear()
        self.apply_moves()
        slots, capacity = self.sizing(max(requests, buffers.slots), max(length, buffers.capacity), most)
        buffers.resize(slots, capacity)
        self.mover = None

    def clear(self) -> None:
        """Release the memory. No request may be allocated."""
        self._clear()

    def _clear(self) -> None:
        assert not self._handles
        self.buffers.clear()
        self._moves.clear()
        self._retained.clear()
        self.mover = None

    def forget(self) -> None:
        self._retained.clear()

    @property
    def keeps_texts(self) -> bool:
        """Whether later requests may start from texts of requests that have ended."""
        return bool(self._retained)

    def has_room(self, length: int) -> bool:
        return len(self._slot_of) < self.slots and length <= self.capacity

    def allocate(self, prompt: Seq[int] = ()) -> tuple[KVHandle, int]:
        slot = self._next_slot()
        source, reused = slot, 0
        if prompt and self._retained:
            shared = {kept: common_prefix(text, prompt) for kept, text in self._retained.items()}
            source = max(shared, key=shared.__getitem__)
            reused = min(shared[source], len(prompt) - 1)  # the logits after the last token are needed
        self._retained.pop(slot, None)
        if not reused:
            self._moves.pop(slot, None)
        elif source != slot:
            self._copy(source, slot, reused)
        return self._take(slot, reused), reused

    def _next_slot(self) -> int:
        if len(self._slot_of) == self.slots:
            raise CapacityError(f"All {self.slots} slots of the KV cache are taken.")
        return self._handles.index(GAP) if self._num_gaps else len(self._handles)

    def _take(self, slot: int, length: int) -> KVHandle:
        handle = self.next_handle
        self.next_handle += 1
        if slot == len(self._handles):
            self._handles.append(handle)
            self._lengths.append(length)
        else:
            self._num_gaps -= 1
            self._handles[slot], self._lengths[slot] = handle, length
        self._slot_of[handle] = slot
        return handle

    def writer(self, plan: StepPlan) -> Cache:
        self.apply_moves()
        self._close_gaps()
        first = self._slot_of[plan.handles[0]]
        assert all(self._slot_of[handle] == first + i for i, handle in enumerate(plan.handles)), "not neighbours"
        self.buffers.begin(plan, first)
        return self.buffers

    def commit(self, handle: KVHandle, first: int, others: Seq[int] = ()) -> int:
        """Record the moves; they are carried out before the slot is read again."""
        slot = self._slot_of[handle]
        start = self._lengths[slot]
        length = self._lengths[slot] = start + first + len(others)
        if others and start + others[-1] != length - 1:  # otherwise all rows are where they belong, since they ascend
            self._moves[slot] = [start + row for row in others], range(start + first, length)
        return length

    def take_moves(self, slots: int, most: int) -> tuple[Ints, Ints]:
        """Hand over the noted moves, if they are of at most so many `slots` and at most `most` positions of each.

        Returns the slots, their numbers of positions and where the first goes, [slots, 3], the others behind it;
        and the positions to read. Other moves are carried out.
        """
        if self._moves and (len(self._moves) > slots or max(len(read) for read, _ in self._moves.values()) > most):
            self.apply_moves()
        moves, self._moves = self._moves, {}
        about = [(slot, len(read), write[0]) for slot, (read, write) in moves.items()]
        sources = [position for read, _ in moves.values() for position in read]
        return np.array(about, np.int64).reshape(-1, 3), np.array(sources, np.int64)

    def apply_moves(self) -> None:
        """Carry out all noted moves."""
        if not self._moves:
            return
        if self.mover is not None:
            self.mover.apply(self._moves)
            self._moves.clear()
            return
        slots = np.repeat(list(self._moves), [len(source) for source, _ in self._moves.values()])
        sources, targets = (np.concatenate(positions) for positions in zip(*self._moves.values(), strict=True))
        for buffer in self.buffers.tensors():
            slot, read, write = (torch.from_numpy(part).to(buffer.device) for part in (slots, sources, targets))
            buffer[slot, :, write] = buffer[slot, :, read]
        self._moves.clear()

    def _copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot, and the moves that are noted for them."""
        self._moves.pop(target, None)
        if source in self._moves:
            self._moves[target] = self._moves[source]
            length = max(length, self._moves[source][0][-1] + 1)
        if self.mover is not None:
            self.mover.copy(source, target, length)
            return
        for buffer in self.buffers.tensors():
            buffer[target, :, :length] = buffer[source, :, :length]

    def fork(self, handle: KVHandle, length: int) -> KVHandle:
        slot = self._next_slot()
        self._retained.pop(slot, None)
        self._copy(self._slot_of[handle], slot, length)
        return self._take(slot, length)

    def free(self, handle: KVHandle, tokens: Seq[int] = ()) -> None:
        slot = self._slot_of.pop(handle)
        if self._leaves_gaps or slot == len(self._handles) - 1:
            if tokens:
                self._retained[slot] = list(tokens)
            else:
                self._moves.pop(slot, None)
            self._handles[slot] = GAP
            self._num_gaps += 1
            while self._handles and self._handles[-1] == GAP:
                self._num_gaps -= 1
                del self._handles[-1], self._lengths[-1]
            return
        last, length = self._handles.pop(), self._lengths.pop()
        # The last request moves into the gap, so that the requests stay neighbours.
        self._copy(len(self._handles), slot, length)
        self._moves.pop(len(self._handles), None)
        self._handles[slot], self._lengths[slot], self._slot_of[last] = last, length, slot

    def _close_gaps(self) -> None:
        """Make the requests neighbours, in their order."""
        if not self._num_gaps:
            return
        kept = [(handle, self._lengths[slot]) for slot, handle in enumerate(self._handles) if handle != GAP]
        for slot, (handle, length) in enumerate(kept):
            if self._slot_of[handle] != slot:
                self._retained.pop(slot, None)
                self._copy(self._slot_of[handle], slot, length)
                self._moves.pop(self._slot_of[handle], None)
                self._slot_of[handle] = slot
        self._handles, self._lengths = [handle for handle, _ in kept], [length for _, length in kept]
        self._num_gaps = 0

    def truncate(self, handle: KVHandle, length: int) -> None:
        """Keep the first `length` tokens of a request; the others will be written again."""
        slot = self._slot_of[handle]
        self._lengths[slot] = min(self._lengths[slot], length)

    def abandon(self) -> None:
        for known in (self._handles, self._lengths, self._slot_of, self._retained, self._moves):
            known.clear()
        self._num_gaps = 0

    def export_kv(self, handle: KVHandle, start: int, end: int) -> KVState:
        self.apply_moves()
        slot, positions = self._slot_of[handle], slice(start, end)
        layers = [
            tuple(buffer[slot, None, :, positions].clone() for buffer in layer.tensors())
            if isinstance(layer, SlotLayer) and layer.is_initialized
            else None
            for layer in self.buffers.layers
        ]
        return KVState(layers, end - start)

    def write_kv(self, handle: KVHandle, state: KVState) -> int:
        self.apply_moves()
        slot = self._slot_of[handle]
        at = slice(self._lengths[slot], self._lengths[slot] + state.length)
        for index, kv in enumerate(state.layers):
            if kv is None:
                continue
            layer = self.buffers.layer(index)
            if not layer.is_initialized:
                layer.allocate_like(kv)
            for buffer, part in zip(layer.tensors(), kv, strict=True):
                buffer[slot, :, at] = part[0]
        return state.length

    def import_kv(self, handle: KVHandle, state: KVState) -> int:
        self._lengths[self._slot_of[handle]] = 0
        return self.commit(handle, self.write_kv(handle, state))

    def pack(self, handle: KVHandle, start: int, end: int) -> PackedKV:
        self.apply_moves()
        slot = self._slot_of[handle]
        if self.mover is not None:
            return self.mover.pack(slot, start, end)
        groups = alike(self.buffers.tensors())
        blocks = tuple(torch.stack([buffer[slot, :, start:end] for buffer in group]) for group in groups)
        return PackedKV(blocks, end - start)

    def unpack(self, handle: KVHandle, kv: PackedKV) -> int:
        slot, buffers = self._slot_of[handle], self.buffers.tensors()
        if not buffers:  # their memory was released meanwhile
            return 0
        if self.mover is not None:
            self.mover.unpack(slot, kv)
        else:
            for group, block in zip(alike(buffers), kv.blocks, strict=True):
                torch._foreach_copy_([buffer[slot, :, : kv.length] for buffer in group], list(block))
        self._lengths[slot] = kv.length
        return kv.length
