"""The repeated layers of a model through torch.compile: one layer is compiled and serves for all.

A layer's index would make each of them a program of its own, since it selects the KV buffers. So the cache is told
outside of the compiled code which layer comes next, and the index is left dynamic inside.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from lookfar.core.cache_dir import cache_dir
from lookfar.errors import ConfigError
from lookfar.kernels.row_sum_mode import RowSums
from lookfar.models.packed_linear import forwards_replaced

RECOMPILES = 32  # kinds of layers and steps that need code of their own


class CompiledLayers:
    """The compiled layers of a model. Calling it runs the whole model with them.

    With `exact` the bits of a row do not depend on the number of rows, outside of the layers too.
    """

    def __init__(self, model: PreTrainedModel, backend: str = "inductor", exact: bool = False) -> None:
        _keep_on_disk()
        names = set(model._no_split_modules or ())
        numbered = [(layer, _number(layer)) for layer in model.modules() if type(layer).__name__ in names]
        self.layers = [layer for layer, number in numbered if number is not None]
        if not self.layers:
            raise ConfigError(f"compile=True finds no repeated layers in {type(model).__name__}: remove it.")
        self.model = model
        self._row_sums = RowSums() if exact else None
        self.select_layer: Callable[[int], None] = ignore_layer  # called before each layer
        run = {type(layer): torch.compile(type(layer).forward, dynamic=True, backend=backend) for layer in self.layers}
        self._forwards = [self._forward_of(n, layer, run[type(layer)]) for layer, n in numbered if n is not None]

    def _forward_of(self, number: int, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.select_layer(number)
            with self._row_sums.paused() if self._row_sums is not None else nullcontext():
                return run(layer, *args, **kwargs)

        return forward

    def __call__(self, **arguments: Any) -> Any:
        """Run a forward pass of the whole model."""
        from torch._inductor import config as inductor

        # The index of a layer is a variable. Other numbers are not: tracing them as variables fails, and starts again.
        tracing = torch._dynamo.config.patch(
            allow_unspec_int_on_nn_module=True, specialize_float=True, recompile_limit=RECOMPILES
        )
        combined = inductor.patch(combo_kernels=True)  # one kernel rotates queries and keys
        replaced = forwards_replaced(self.layers, self._forwards)
        with replaced, tracing, combined, warnings.catch_warnings(), self._row_sums or nullcontext():
            warnings.simplefilter("ignore")  # advice to round float32
            return self.model(**arguments)


def computes_weights(model: PreTrainedModel) -> bool:
    """Whether a layer of a model computes its weight before it uses it."""
    return any(module._forward_pre_hooks or parametrize.is_parametrized(module) for module in model.modules())


def ignore_layer(layer: int) -> None:
    """Do nothing: no cache is in use."""


def _number(layer: nn.Module) -> int | None:
    """Return the layer of the KV cache that a layer uses."""
    numbers = (vars(part).get("layer_idx") for part in layer.modules())
    return next((number for number in numbers if isinstance(number, int)), None)


def _keep_on_disk() -> None:
    """Put compiled code into our cache directory unless the user has chosen one; torch would use a temporary one."""
    from torch._inductor.runtime import cache_dir_utils

    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name) in (None, cache_dir_utils.default_cache_dir()):
        os.environ[name] = str(cache_dir() / "compiled")
