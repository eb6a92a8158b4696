"""Prompts that begin like an earlier text start from its KV."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from lookfar.core.ids import common_prefix
from lookfar.engine.request import RequestState
from lookfar.kvcache.base import KVCache
from lookfar.kvcache.prefix_cache import PrefixCache

WORTH_WAITING = 64  # tokens
NO_MEMORY = (MemoryError, RuntimeError)  # of the host and of a device


class PrefixReuse:
    """Finds the KV of a request's beginning: in the prefix cache if there is one, else in slots that were freed.

    What freed slots hold is shared by all requests without a namespace; the prefix cache keeps namespaces apart.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.prefixes: PrefixCache | None = None

    def allocate(self, state: RequestState) -> None:
        """Give a request its place in the KV cache."""
        kv = state.request.kv
        reuses = kv.reuse and kv.first is None  # the tokens of an image do not say which
        from_slots = reuses and self.prefixes is None and not kv.namespace
        state.kv, state.num_cached = self._cache.allocate(state.request.prompt if from_slots else ())
        if reuses and self.prefixes is not None:
            known = self.prefixes.find(kv.namespace, state.ids[:-1])  # the logits after the last token are needed
            if known is not None:
                with suppress(*NO_MEMORY):  # then it is computed again
                    state.num_cached = self._cache.unpack(state.kv, known)

    def comes_soon(self, state: RequestState, running: Iterable[RequestState]) -> bool:
        """Whether a running request is reading much of the same prompt: waiting is faster than reading it twice."""
        kv = state.request.kv
        if self.prefixes is None or not kv.reuse or kv.first is not None or state.swapped is not None:
            return False
        for other in running:
            same = other.request.kv.reuse and other.request.kv.namespace == kv.namespace
            if same and other.request.kv.first is None and not other.stats.steps:
                shared = common_prefix(other.request.prompt, state.ids)
                if shared - self.prefixes.match(kv.namespace, state.ids) >= WORTH_WAITING:
                    return True
        return False

    def keep(self, state: RequestState) -> None:
        """Copy the KV of a text into the prefix cache, if there is one."""
        kv = state.request.kv
        if self.prefixes is not None and kv.reuse and _is_known(state):
            tokens = state.ids[: state.num_cached]
            try:
                self.prefixes.add(kv.namespace, tokens, partial(self._cache.pack, state.kv))
            except NO_MEMORY:
                self.prefixes.clear()

    def free(self, state: RequestState) -> None:
        """Take the place of a request; later ones may start from its KV if its tokens are known."""
        self.keep(state)
        left = _is_known(state) and self.prefixes is None and not state.request.kv.namespace
        self._cache.free(state.kv, state.ids[: state.num_cached] if left else ())


def _is_known(state: RequestState) -> bool:
    """Whether the KV of a request is that of its tokens."""
    kv = state.request.kv
    return kv.embeds is None and kv.past is None and kv.first is None and state.error is None
