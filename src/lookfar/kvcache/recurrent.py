"""A slot cache for models with recurrent state, which cannot be undone token by token.

A step works on a copy of the states of its requests. `commit` keeps the copy if all rows of the request were accepted.
Otherwise the request stays as it was before the step, and its accepted tokens are fed again in front of the next
drafts: this costs rows and never a forward pass. Keys and values of attention layers are written again with them.

The copies go through transformers' own cache layers, so the model's code is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from lookfar.core.plan import StepPlan
from lookfar.errors import CapacityError
from lookfar.kvcache.base import KVHandle, KVState, StateKey
from lookfar.kvcache.slot_buffers import SlotBuffers, SlotLayer
from lookfar.kvcache.slots import SlotKVCache

ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)

States = dict[StateKey, torch.Tensor]


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether transformers' own cache for a config holds recurrent states, and nothing that is unknown here."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return kinds <= {*ATTENTION, *BOTH, LinearAttentionLayer} and not kinds <= set(ATTENTION)


def holds_state(layer: Any) -> bool:
    """Whether a layer of a transformers cache holds recurrent states."""
    return isinstance(layer, LinearAttentionLayer)


class StateLayer(LinearAttentionLayer):
    """The states of one layer for the requests of a step."""

    def __init__(self, cache: SlotBuffers, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class StateAndSlotLayer(StateLayer, SlotLayer):
    """States, and the buffers of an attention beside them."""

    def __init__(self, cache: SlotBuffers, number_of_states: int) -> None:
        SlotLayer.__init__(self, cache)
        StateLayer.__init__(self, cache, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys and values (two positional arguments) or states (named ones), as transformers' own does."""
        (SlotLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)


class RecurrentBuffers(SlotBuffers):
    """Slot buffers of attention layers, and the layers through which a step reads and writes states."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(0, 0)
        self._config = config
        self._add_layers()

    def _add_layers(self) -> None:
        for own in DynamicCache(config=self._config).layers:
            if isinstance(own, BOTH):
                self.layers.append(StateAndSlotLayer(self, own.number_of_states))
            elif isinstance(own, LinearAttentionLayer):
                self.layers.append(StateLayer(self, own.number_of_states))
            else:
                self.layers.append(SlotLayer(self))

    def clear(self) -> None:
        super().clear()
        self._add_layers()

    def states(self) -> States:
        """Return the states of the requests of the last step, [batch, …] each."""
        return states_of(self)

    def set_states(self, states: States, continues: bool) -> None:
        """Give the layers the states that the next step begins with; without `continues` it begins texts."""
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
        for (index, name, i), state in states.items():
            layer = self.layers[index]
            getattr(layer, name)[i] = state
            getattr(layer, f"is_{name}_initialized")[i] = True
            layer.has_previous_state[i] = continues
            if name == "conv_states":
                layer.conv_kernel_size[i] = state.shape[-1]


class RecurrentKVCache(SlotKVCache):
    """Slots with recurrent states: a step is kept as a whole or not at all."""

    keeps_accepted = False
    shares_prefixes = False  # a state belongs to one length of its text

    def __init__(self, config: PreTrainedConfig, reuse: bool = True) -> None:
        super().__init__()
        self._reuse = reuse  # whether a state after an answer is that after the same tokens in a prompt
        self.buffers: RecurrentBuffers = RecurrentBuffers(config)
        self._states: States = {}  # committed, [slots, …] each
        self._devices: dict[StateKey, torch.device] = {}  # of states that were there once
        self._in_step: list[KVHandle] = []  # requests of the forward pass that ran last, in the order of its rows
        self._width = 0  # rows of each of them, padding included
        self._after: dict[KVHandle, tuple[States, int, int]] = {}  # states behind a step, their place, and its width
        self._kept: dict[int, tuple[States, int]] = {}  # by slot: states to take over before they are read

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(state.nbytes for state in self._states.values())

    def reserve(self, requests: int, length: int, *, most: int, keep: bool) -> None:
        self._take_over()
        super().reserve(requests, length, most=most, keep=keep)
        self._resize(self.slots)

    def _resize(self, slots: int) -> None:
        """Make room for the states of more slots."""
        for key, old in self._states.items():
            if len(old) < slots:
                self._states[key] = _zeros(old, slots)
                self._states[key][: len(old)] = old

    def clear(self) -> None:
        super().clear()
        for known in (self._states, self._after, self._kept, self._in_step):
            known.clear()

    def allocate(self, prompt: Seq[int] = ()) -> tuple[KVHandle, int]:
        """Allocate a request. It starts from an earlier text if its prompt begins with all of it."""
        self._take_over()
        slot = self._next_slot()
        whole = {kept: len(text) for kept, text in self._retained.items() if _begins(prompt, text)}
        source = max(whole, key=whole.__getitem__) if whole else slot
        reused = whole.get(source, 0)
        self._retained.pop(slot, None)
        if not reused:
            for state in self._states.values():
                state[slot].zero_()
        elif source != slot:
            self._copy(source, slot, reused)
        return self._take(slot, reused), reused

    def writer(self, plan: StepPlan) -> Cache:
        self._collect()
        self._take_over()
        super().writer(plan)
        self._in_step = [rows.kv for rows in plan.requests]
        self._width = plan.width
        first = self._slot_of[self._in_step[0]]
        committed = [state[first : first + plan.batch] for state in self._states.values()]
        copies = [torch.empty_like(state) for state in committed]
        if copies:
            torch._foreach_copy_(copies, committed)
        states = dict(zip(self._states, copies, strict=True))
        self.buffers.set_states(states, continues=bool(plan.num_cached.any()))
        return self.buffers

    def _collect(self) -> None:
        """Note the states that the last forward pass has left."""
        if self._in_step:
            states = self.buffers.states()
            for place, handle in enumerate(self._in_step):
                self._after[handle] = states, place, self._width
            self._in_step = []

    def commit(self, handle: KVHandle, first: int, others: Seq[int] = ()) -> int:
        """Keep all rows of the last step, or none; return the number of cached tokens."""
        self._collect()
        slot, (states, place, width) = self._slot_of[handle], self._after.pop(handle)
        if first + len(others) < width:
            return self._lengths[slot]
        self._kept[slot] = states, place
        return super().commit(handle, first, others)

    def _take_over(self) -> None:
        """Copy the states that were kept into their slots, all requests of a step at once."""
        kept, self._kept = self._kept, {}
        together: dict[int, tuple[States, list[int], list[int]]] = {}
        for slot, (states, place) in kept.items():
            _, slots, places = together.setdefault(id(states), (states, [], []))
            slots.append(slot)
            places.append(place)
        for states, slots, places in together.values():
            for key, state in states.items():
                if key not in self._states:
                    self._states[key] = _zeros(state, self.slots)
                    self._devices[key] = state.device
            if len(slots) == slots[-1] - slots[0] + 1 == places[-1] - places[0] + 1:  # neighbours
                own = [self._states[key][slots[0] : slots[-1] + 1] for key in states]
                torch._foreach_copy_(own, [state[places[0] : places[-1] + 1] for state in states.values()])
                continue
            for key, state in states.items():
                self._states[key][slots] = state[places]

    def _copy(self, source: int, target: int, length: int) -> None:
        self._take_over()
        super()._copy(source, target, length)
        for state in self._states.values():
            state[target] = state[source]

    def fork(self, handle: KVHandle, length: int) -> KVHandle:
        if length != self._lengths[self._slot_of[handle]]:
            raise ValueError("A recurrent state can be forked at its last token only.")
        return super().fork(handle, length)

    def free(self, handle: KVHandle, tokens: Seq[int] = ()) -> None:
        self._take_over()
        self._after.pop(handle, None)
        super().free(handle, tokens if self._reuse else ())

    def abandon(self) -> None:
        super().abandon()
        for known in (self._after, self._kept, self._in_step):
            known.clear()

    def export_kv(self, handle: KVHandle, start: int, end: int) -> KVState:
        self._take_over()
        slot = self._slot_of[handle]
        kv = super().export_kv(handle, start, end)
        recurrent = {key: state[slot, None].clone() for key, state in self._states.items()}
        return KVState(kv.layers, kv.length, recurrent)

    def write_kv(self, handle: KVHandle, state: KVState) -> int:
        self._collect()
        states = {key: own.to(self._devices.get(key, own.device)) for key, own in state.recurrent.items()}
        self._after[handle] = states, 0, state.length
        return super().write_kv(handle, state)


def states_of(cache: Cache) -> States:
    """Return the recurrent states of a cache, [batch, …] each."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for name in ("conv_states", "recurrent_states") if isinstance(layer, LinearAttentionLayer) else ():
            for i, state in getattr(layer, name).items():
                if state is not None:
                    found[index, name, i] = state
    return found


def whole_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return a cache for one forward pass that keeps all positions, also those that have left a sliding window."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
            cache.layers[index] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            cache.layers[index] = DynamicLayer()
    return cache


def _begins(prompt: Seq[int], text: Seq[int]) -> bool:
    """Whether a prompt begins with a text and goes on after it: the logits after its last token are needed."""
    return len(text) < len(prompt) and list(prompt[: len(text)]) == list(text)


def _zeros(like: torch.Tensor, slots: int) -> torch.Tensor:
    try:
        return torch.zeros(slots, *like.shape[1:], dtype=like.dtype, device=like.device)
    except (RuntimeError, MemoryError) as error:
        raise CapacityError(
            f"There is no memory for the recurrent state of {slots} requests: lower max_batch."
        ) from error
