"""Fused linear layers: layers that read the same input become one multiplication (queries, keys, values; gate, up).

Groups are found by observing a forward pass, not by layer names. Their weights are laid side by side in memory,
so that one multiplication can read them; each layer keeps its own part as its weight, and no number changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lookfar.kernels.linear_op import linear


class SingleLinear(nn.Linear):
    """A linear layer that belongs to no group."""

    exact: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.exact)


class FusedHead(SingleLinear):
    """The first layer of a group: it multiplies for all and leaves the other results in `shared`."""

    shared: list[Any]  # the input, then the results of the layers that were not called yet
    fused_weight: torch.Tensor
    fused_bias: torch.Tensor | None
    sizes: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = linear(x, self.fused_weight, self.fused_bias, self.exact)
        parts: Sequence[torch.Tensor] = torch.split(product, self.sizes, -1)
        self.shared.clear()
        self.shared.append(x)
        self.shared.extend(parts[1:])
        return parts[0]


class FusedTail(SingleLinear):
    """A later layer of a group: it takes its result from `shared` if it is called with the same input."""

    shared: list[Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.shared) > 1 and self.shared[0] is x:
            part: torch.Tensor = self.shared.pop(1)
            if len(self.shared) == 1:
                self.shared.clear()
            return part
        return super().forward(x)


@dataclass
class FusedGroup:
    """Layers that are called one after the other with the same input."""

    layers: list[Any]
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, layers: list[Any]) -> FusedGroup:
        """Lay the weights of some layers side by side."""
        weight = _side_by_side([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers]
        return cls(layers, weight, None if biases[0] is None else _side_by_side(biases))

    def fuse(self) -> None:
        head, shared = self.layers[0], []  # type: ignore[var-annotated]
        sizes = [layer.out_features for layer in self.layers]
        vars(head).update(fused_weight=self.weight, fused_bias=self.bias, sizes=sizes)
        for place, layer in enumerate(self.layers):
            layer.__class__ = FusedTail if place else FusedHead
            vars(layer)["shared"] = shared

    def separate(self) -> None:
        for layer in self.layers:
            for name in ("shared", "fused_weight", "fused_bias", "sizes"):
                vars(layer).pop(name, None)


class FusedLinears:
    """The fused groups of a model, found in a forward pass that `run` makes.

    With `exact` the bits of a row do not depend on the number of rows.
    """

    def __init__(self, model: PreTrainedModel, run: Callable[[], Any], exact: bool = False) -> None:
        self.exact = exact
        self.layers = _plain_layers(model)
        self.groups = [FusedGroup.of(layers) for layers in _find_groups(model, run)]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Fuse the layers while the context is open; afterwards the model is as it was."""
        for layer in self.layers:
            layer.__class__ = SingleLinear
            vars(layer)["exact"] = self.exact
        for group in self.groups:
            group.fuse()
        try:
            yield
        finally:
            for group in self.groups:
                group.separate()
            for layer in self.layers:
                layer.__class__ = nn.Linear
                del vars(layer)["exact"]


def _side_by_side(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Move some parameters into one tensor, which then changes with them, unless they lie in one already."""
    first = parameters[0]
    ends = list(accumulate((one.nbytes for one in parameters), initial=first.data_ptr()))
    if [one.data_ptr() for one in parameters] == ends[:-1] and all(
        one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for one in parameters
    ):
        rows = sum(len(one) for one in parameters)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat(parameters)
    for parameter, part in zip(parameters, torch.split(whole, [len(one) for one in parameters]), strict=True):
        parameter.data = part
    return whole


def _plain_layers(model: PreTrainedModel) -> list[Any]:
    """Return the linear layers that are torch's own, with nothing around them."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear and "forward" not in vars(layer) and _is_plain(layer)
    ]


def _is_plain(layer: nn.Linear) -> bool:
    """Whether its weight can be moved: a parameter, not the result of pruning, with nothing called around the layer."""
    weight = layer._parameters.get("weight")
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    return weight is not None and weight.is_floating_point() and not weight.is_inference() and not hooks


def _find_groups(model: PreTrainedModel, run: Callable[[], Any]) -> list[list[Any]]:
    """Find linear layers that are called once each, one after the other, with the same tensor, and share no weight."""
    users = Counter(p.data_ptr() for module in model.modules() for p in module._parameters.values() if p is not None)
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
        alone = times[id(layer)] > 1 or users[layer.weight.data_ptr()] > 1
        if alone or not groups[-1] or given is not before or not _alike(groups[-1][0], layer):
            groups.append([])
        if not alone:
            groups[-1].append(layer)
        before = given
    return [group for group in groups if len(group) > 1]


def _alike(one: Any, other: Any) -> bool:
    a, b = one.weight, other.weight
    return bool(a.dtype == b.dtype and a.device == b.device and (one.bias is None) == (other.bias is None))
