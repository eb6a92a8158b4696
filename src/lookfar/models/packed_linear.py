"""Linear layers of a CPU model with prepacked weights, for the time of a forward pass.

torch's own float32 `linear` packs its weights again in every call with two rows or more. oneDNN can keep them packed:
for one more copy of the weights, eight rows cost about as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import MethodType
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lookfar.models.weight_changes import WeightState

# The layout that oneDNN picks for this many rows also serves one row and a hundred; the one for one row does not.
ROWS = 8
SPARE = 2.0  # pack by default only if this many times the copy is free


@dataclass
class PackedWeight:
    """A packed copy of a weight."""

    weight: torch.Tensor  # kept, so that no other tensor gets its id
    state: WeightState  # when it was packed
    packed: torch.Tensor


class PackedLinears:
    """The linear layers of one model. Layers that share a weight share its packed copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.thread = 0  # the one whose calls use the packed weights
        self._packed: dict[int, PackedWeight] = {}  # by the id of the weight
        self._find_layers()

    def _find_layers(self) -> None:
        self.layers: list[nn.Module] = [layer for layer in self.model.modules() if _can_pack(layer)]
        self._forwards = [PackedForward(self, layer) for layer in self.layers]

    def refresh(self, everything: bool = False) -> bool:
        """Follow changes of the model: other layers, and weights that have changed, or all. Not while a step runs.

        Returns whether a packed copy was dropped.
        """
        before = len(self._packed)
        if everything:
            self._packed.clear()
        self._find_layers()
        used = {id(weight_of(layer)) for layer in self.layers}
        self._packed = {
            key: known
            for key, known in self._packed.items()
            if key in used and known.state == WeightState.of(known.weight)
        }
        return len(self._packed) < before

    @property
    def nbytes(self) -> int:
        """The memory that the packed copies take, or will take."""
        weights = {weight_of(layer).data_ptr(): weight_of(layer) for layer in self.layers}
        return sum(weight.numel() * weight.element_size() for weight in weights.values())

    def pack(self, layer: nn.Module) -> torch.Tensor:
        """Return the packed weight of a layer, packing it again if the weight has changed."""
        weight = weight_of(layer)
        known = self._packed.get(id(weight))
        if known is None or not known.state.may_be_of(weight):
            state, matrix = WeightState.of(weight), weight.detach()
            matrix = matrix.t() if isinstance(layer, Conv1D) else matrix
            packed = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), ROWS)
            known = self._packed[id(weight)] = PackedWeight(weight, state, packed)
        return known.packed

    @property
    def missing(self) -> list[nn.Module]:
        """Layers whose weights are not packed yet."""
        return [layer for layer in self.layers if id(weight_of(layer)) not in self._packed]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the layers compute with their packed weights while the context is open, in calls of this thread."""
        self.thread = get_ident()
        with forwards_replaced(self.layers, self._forwards):
            yield


@contextmanager
def forwards_replaced(layers: Seq[nn.Module], forwards: Seq[Callable[..., Any]]) -> Iterator[None]:
    """Give each layer another forward while the context is open."""
    for layer, forward in zip(layers, forwards, strict=True):
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)  # another LM of the same model may have removed it


def has_room(nbytes: int) -> bool:
    """Whether there is memory to spare for a copy of the weights."""
    return nbytes > 0 and nbytes * SPARE < psutil.virtual_memory().available


def _can_pack(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
        return False  # a layer of another library, or one that is wrapped already (offloaded weights)
    weight = layer._parameters.get("weight")
    usable: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # A weight that is not a parameter is computed in each forward pass (pruning, weight normalisation).
    return usable and weight is not None and weight.device.type == "cpu" and weight.dtype == torch.float32


def weight_of(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


class PackedForward:
    """The forward method of a layer with its packed weight, in calls of the thread that decodes."""

    def __init__(self, packed: PackedLinears, layer: nn.Module) -> None:
        self.packed = packed
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        if get_ident() != self.packed.thread:  # another thread uses the model meanwhile
            result = type(self.layer).forward(self.layer, x)
        else:
            weight = self.packed.pack(self.layer)
            result = torch.ops.mkldnn._linear_pointwise(x, weight, self.layer.bias, "none", [], "")
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        """A copy of the model that is made meanwhile gets the layer's own method."""
        return MethodType(type(self.layer).forward, memo.get(id(self.layer), self.layer))

    def __reduce__(self) -> Any:
        return MethodType, (type(self.layer).forward, self.layer)
