"""The repeated layers of a model through torch.compile: one of them is compiled, and serves for all.

A layer's number would make each of them a program of its own, since it says which keys and values to use. So the cache
is told outside of the compiled code whose turn it is, and the number is left open inside.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lookfar.demo import cache_dir
from lookfar.errors import ConfigError
from lookfar.pack import forwards_replaced

RECOMPILES = 32  # kinds of layers and of steps that differ so much that they need code of their own


class CompiledLayers:
    """The layers of a model that are compiled, and a way to run the model with them."""

    def __init__(self, model: PreTrainedModel, backend: str = "inductor") -> None:
        _keep_on_disk()
        names = set(model._no_split_modules or ())
        numbered = [(layer, _number(layer)) for layer in model.modules() if type(layer).__name__ in names]
        self.layers = [layer for layer, number in numbered if number is not None]
        if not self.layers:
            raise ConfigError(f"compile=True finds no repeated layers in {type(model).__name__}: leave it away.")
        self.model = model
        self.turn: Callable[[int], None] = no_turn  # called before each layer
        run = {type(layer): torch.compile(type(layer).forward, dynamic=True, backend=backend) for layer in self.layers}
        self._forwards = [self._forward_of(n, layer, run[type(layer)]) for layer, n in numbered if n is not None]

    def _forward_of(self, number: int, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.turn(number)
            return run(layer, *args, **kwargs)

        return forward

    def __call__(self, **arguments: Any) -> Any:
        """A forward of the whole model."""
        open_numbers = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=RECOMPILES)
        with forwards_replaced(self.layers, self._forwards), open_numbers, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about float32, for which exactness is the point
            return self.model(**arguments)


def no_turn(layer: int) -> None:
    """Nobody needs to know whose turn it is."""


def _number(layer: nn.Module) -> int | None:
    """Which layer of the cache a layer uses."""
    numbers = (vars(part).get("layer_idx") for part in layer.modules())
    return next((number for number in numbers if isinstance(number, int)), None)


def _keep_on_disk() -> None:
    """Compiled code goes to our cache, unless the user has named a place; torch would use a temporary directory."""
    from torch._inductor.runtime import cache_dir_utils

    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name) in (None, cache_dir_utils.default_cache_dir()):
        os.environ[name] = str(cache_dir() / "compiled")
