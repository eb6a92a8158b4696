"""The KV cache interface of the engine: requests hold handles, and the memory layout is private to the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import torch
from transformers import Cache

from lookfar.core.packed_kv import PackedKV
from lookfar.core.plan import StepPlan

KVHandle = int
StateKey = tuple[int, str, int]  # layer, conv_states or recurrent_states, index of the state


@dataclass(frozen=True)
class KVState:
    """What the cache holds of one request."""

    # For each layer keys, values, perhaps keys of an indexer, [1, heads, positions, dim]; None for a layer without.
    layers: list[tuple[torch.Tensor, ...] | None]
    length: int  # tokens
    recurrent: Mapping[StateKey, torch.Tensor] = field(default_factory=dict)  # recurrent states, [1, …]

    def to_host(self) -> KVState:
        """Return a copy in host memory."""
        layers = [None if kv is None else tuple(part.cpu() for part in kv) for kv in self.layers]
        return KVState(layers, self.length, {key: state.cpu() for key, state in self.recurrent.items()})


class KVCache(ABC):
    """The KV of the running requests.

    A step writes its rows behind the committed positions of their requests; `commit` then keeps the accepted ones.
    `commit` returns how many tokens are really cached, and the engine feeds the rest again: a cache with recurrent
    state keeps all rows of a step or none.
    """

    keeps_accepted = False  # whether `commit` always keeps all rows that it is given
    shares_prefixes = False  # whether the KV of any positions can be packed, and unpacked for another request

    @property
    @abstractmethod
    def order(self) -> Seq[KVHandle]:
        """The allocated handles in memory order. The requests of one step have to be neighbours in this order."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The positions that a request may use at present; `reserve` adds more."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory held."""

    @abstractmethod
    def reserve(self, requests: int, length: int, *, most: int, keep: bool) -> None:
        """Make room for `requests` requests of `length` positions each; there will never be more than `most` of them.

        With `keep` the present contents stay; otherwise their memory may be released first. Raises `CapacityError`.
        """

    @abstractmethod
    def forget(self) -> None:
        """Forget the texts of requests that have ended: their KV is of no use any more."""

    @abstractmethod
    def has_room(self, length: int) -> bool:
        """Whether a request of `length` positions can be allocated now."""

    @abstractmethod
    def allocate(self, prompt: Seq[int] = ()) -> tuple[KVHandle, int]:
        """Allocate a request. Returns its handle and how many leading tokens of `prompt` are cached already."""

    @abstractmethod
    def writer(self, plan: StepPlan) -> Cache:
        """Return the transformers cache through which a forward pass writes the rows of a plan."""

    @abstractmethod
    def commit(self, handle: KVHandle, first: int, others: Seq[int] = ()) -> int:
        """Keep the first rows of the last step and some others (ascending); return the number of cached tokens."""

    @abstractmethod
    def fork(self, handle: KVHandle, length: int) -> KVHandle:
        """Allocate a request that starts with the first `length` positions of another one."""

    @abstractmethod
    def free(self, handle: KVHandle, tokens: Seq[int] = ()) -> None:
        """Free a request. `tokens` is the text of its cached positions, if later requests may start from them."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget all requests without touching their memory, which may be in any state."""

    @abstractmethod
    def export_kv(self, handle: KVHandle, start: int, end: int) -> KVState:
        """Return a copy of some positions of a request."""

    @abstractmethod
    def write_kv(self, handle: KVHandle, state: KVState) -> int:
        """Write rows behind the committed positions of a request, as a step does; return their number."""

    @abstractmethod
    def import_kv(self, handle: KVHandle, state: KVState) -> int:
        """Fill the first positions of a request; return the number of cached tokens."""

    def pack(self, handle: KVHandle, start: int, end: int) -> PackedKV:
        """Return a copy of some positions of a request; only of caches that share prefixes."""
        raise NotImplementedError

    def unpack(self, handle: KVHandle, kv: PackedKV) -> int:
        """Fill the first positions of a request that has none; return the number of cached tokens."""
        raise NotImplementedError


def kv_of(past: Cache) -> KVState:
    """Return the keys and values of a transformers cache; recurrent layers have none."""
    layers: list[tuple[torch.Tensor, ...] | None] = []
    for layer in past.layers:
        used = getattr(layer, "keys", None) is not None and layer.keys.numel()
        indexer = getattr(layer, "indexer_keys", None)
        own = (layer.keys, layer.values) if used else None
        layers.append(own if own is None or indexer is None else (*own, indexer[:, None]))
    return KVState(layers, max((kv[0].shape[-2] for kv in layers if kv is not None), default=0))
