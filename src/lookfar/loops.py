"""The decoding loop that a model brings along, and model classes that have another."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

PLAIN_LOOP = "_lookfar_plain_loop"  # on a loop that stands for all models: the one that it replaced


def own_loop(model: PreTrainedModel) -> Any:
    """transformers' own loop for greedy search and sampling."""
    loop = (type(model)._lookfar_plain if is_accelerated(model) else type(model))._sample
    return getattr(loop, PLAIN_LOOP, loop)


def is_accelerated(model: PreTrainedModel) -> bool:
    """Is its class one of ours?"""
    return "_lookfar_plain" in vars(type(model))


def names_of(plain: Any) -> dict[str, Any]:
    """What a subclass has to define to be taken for the class itself; copies and pickles are of that class again."""

    def reduce_as_plain(self: Any, protocol: Any) -> Any:
        return _blank, (plain,), plain.__reduce_ex__(self, protocol)[2]

    same = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return {**same, "_lookfar_plain": plain, "__reduce_ex__": reduce_as_plain}


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)
