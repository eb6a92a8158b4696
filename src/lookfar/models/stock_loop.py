"""transformers' own decoding loop of a model, and model classes whose loop was replaced."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

STOCK_LOOP = "_lookfar_stock_loop"  # an attribute of a loop that replaced another one for all models


def stock_loop(model: PreTrainedModel) -> Any:
    """Return transformers' own loop for greedy search and sampling."""
    loop = (type(model)._lookfar_stock if is_accelerated(model) else type(model))._sample
    return getattr(loop, STOCK_LOOP, loop)


def is_accelerated(model: PreTrainedModel) -> bool:
    """Whether the model's class is one of ours."""
    return "_lookfar_stock" in vars(type(model))


def stock_attributes(stock: Any) -> dict[str, Any]:
    """Return the attributes that make a subclass pass for the class itself; copies and pickles are of that class."""

    def reduce_as_stock(self: Any, protocol: Any) -> Any:
        return _blank, (stock,), stock.__reduce_ex__(self, protocol)[2]

    same = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    return {**same, "_lookfar_stock": stock, "__reduce_ex__": reduce_as_stock}


def _blank(kind: Any) -> Any:
    return kind.__new__(kind)
