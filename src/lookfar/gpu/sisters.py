"""Linear layers as captured steps run them.

Those that read the same input become one multiplication: queries, keys and values; gate and up. Which ones do is seen
by watching a forward, not by their names. Their weights are laid side by side in memory, so that one large
multiplication can read them; each layer keeps its own part as its weight, and no number changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lookfar.gpu.one_row import linear


class Single(nn.Linear):
    """A layer that multiplies for itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class First(nn.Linear):
    """The one that is called first, and multiplies for all. What it makes for the others waits in `box`."""

    box: list[Any]
    together: torch.Tensor
    their_bias: torch.Tensor | None
    sizes: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: Sequence[torch.Tensor] = torch.split(linear(x, self.together, self.their_bias), self.sizes, -1)
        self.box.clear()
        self.box.append(x)
        self.box.extend(parts[1:])
        return parts[0]


class Sister(Single):
    """Takes its part, if it is called with the same input."""

    box: list[Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.box) > 1 and self.box[0] is x:
            part: torch.Tensor = self.box.pop(1)
            if len(self.box) == 1:
                self.box.clear()
            return part
        return super().forward(x)


@dataclass
class Group:
    """Layers that are called one after the other with the same input."""

    layers: list[Any]
    together: torch.Tensor
    their_bias: torch.Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, layers: list[Any]) -> Group:
        """Lay the weights of some layers side by side."""
        together = torch.cat([layer.weight for layer in layers])
        for layer, part in zip(layers, torch.split(together, [one.out_features for one in layers]), strict=True):
            layer.weight.data = part
        biases = [layer.bias for layer in layers]
        return cls(layers, together, None if biases[0] is None else torch.cat(biases))

    def join(self) -> None:
        first, box = self.layers[0], []  # type: ignore[var-annotated]
        vars(first).update(
            together=self.together, their_bias=self.their_bias, sizes=[layer.out_features for layer in self.layers]
        )
        for place, layer in enumerate(self.layers):
            layer.__class__ = Sister if place else First
            vars(layer)["box"] = box

    def part(self) -> None:
        for layer in self.layers:
            for name in ("box", "together", "their_bias", "sizes"):
                vars(layer).pop(name, None)


class Sisters:
    """The groups of a model, found in a forward that `run` makes, and a way to run the model with them."""

    def __init__(self, model: PreTrainedModel, run: Callable[[], Any]) -> None:
        self.layers = _plain_layers(model)
        self.groups = [Group.of(layers) for layers in _watch(model, run)]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While the block runs, groups multiply at once; then the model is as it was."""
        for layer in self.layers:
            layer.__class__ = Single
        for group in self.groups:
            group.join()
        try:
            yield
        finally:
            for group in self.groups:
                group.part()
            for layer in self.layers:
                layer.__class__ = nn.Linear


def _plain_layers(model: PreTrainedModel) -> list[Any]:
    """Linear layers that are torch's own, with nothing around them."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear and layer.weight.is_floating_point() and "forward" not in vars(layer)
    ]


def _watch(model: PreTrainedModel, run: Callable[[], Any]) -> list[list[Any]]:
    """Linear layers that are called once each, one after the other, with the same tensor, and share no weight."""
    shared = Counter(p.data_ptr() for module in model.modules() for p in module._parameters.values() if p is not None)
    calls: list[tuple[Any, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append((layer, inputs[0])))
        for layer in _plain_layers(model)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(id(layer) for layer, _ in calls)
    groups: list[list[Any]] = [[]]
    before: Any = None
    for layer, given in calls:
        alone = times[id(layer)] > 1 or shared[layer.weight.data_ptr()] > 1
        if alone or not groups[-1] or given is not before or not _alike(groups[-1][0], layer):
            groups.append([])
        if not alone:
            groups[-1].append(layer)
        before = given
    return [group for group in groups if len(group) > 1]


def _alike(one: Any, other: Any) -> bool:
    a, b = one.weight, other.weight
    return bool(a.dtype == b.dtype and a.device == b.device and (one.bias is None) == (other.bias is None))
