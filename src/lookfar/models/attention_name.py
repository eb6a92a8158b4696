"""The attention that a model is run with for the time of a step: a name in its config, which threads may share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from transformers import PreTrainedConfig


class FlatName(str):
    """The name of the attention of flat steps on a CPU, for a model that uses `own`: sdpa or eager.

    A copy of the model that is made during a step gets the model's own attention.
    """

    own: str

    def __new__(cls, own: str) -> FlatName:
        name = super().__new__(cls, f"lookfar_{own}")
        name.own = own
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.own

    def __reduce__(self) -> Any:
        return str, (self.own,)


_lock = Lock()
_replaced: dict[int, tuple[str, int]] = {}  # by the id of a config: its own name, and the steps that run with another


@contextmanager
def attention_replaced(config: PreTrainedConfig, name: str) -> Iterator[None]:
    """Give a config another attention while the context is open.

    The last of several steps puts the config's own name back. A `FlatName` serves as its `own` name in other threads.
    """
    with _lock:
        own, steps = _replaced.get(id(config), (config._attn_implementation, 0))
        _replaced[id(config)] = own, steps + 1
        if config._attn_implementation not in (name, FlatName(name)):
            config._attn_implementation = name
    try:
        yield
    finally:
        with _lock:
            own, steps = _replaced.pop(id(config))
            if steps > 1:
                _replaced[id(config)] = own, steps - 1
            elif config._attn_implementation != own:
                config._attn_implementation = own


def own_attention(config: PreTrainedConfig) -> str:
    """Return the attention of a config, whatever a step has put in its place."""
    with _lock:
        return str(_replaced.get(id(config), (config._attn_implementation, 0))[0])
