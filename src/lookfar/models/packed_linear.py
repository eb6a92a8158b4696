"""Linear layers of a CPU model with prepacked weights, for the time of a forward pass.

torch's own float32 `linear` packs its weights again in every call with two rows or more. oneDNN can keep them packed:
for one more copy of the weights, eight rows cost about as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from threading import get_ident
from types import MethodType
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# The layout that oneDNN picks for this many rows also serves one row and a hundred; the one for one row does not.
ROWS = 8
SPARE = 2.0  # pack by default only if this many times the copy is free


class PackedLinears:
    """The linear layers of one model. Layers that share a weight share its packed copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[nn.Module] = [layer for layer in model.modules() if _can_pack(layer)]
        self.thread = 0  # the one whose calls use the packed weights
        self._packed: dict[int, tuple[int, torch.Tensor]] = {}  # address of the weight → its version, packed
        self._forwards = [PackedForward(self, layer) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """The memory that the packed copies take, or will take."""
        weights = {weight_of(layer).data_ptr(): weight_of(layer) for layer in self.layers}
        return sum(weight.numel() * weight.element_size() for weight in weights.values())

    def packed_weight(self, layer: nn.Module) -> torch.Tensor:
        """Return the packed weight of a layer, packing it again if the weight has changed."""
        weight = weight_of(layer)
        known = self._packed.get(weight.data_ptr())
        if known is None or known[0] != weight._version:
            with torch.no_grad():
                plain = weight.t() if isinstance(layer, Conv1D) else weight
                packed = torch.ops.mkldnn._reorder_linear_weight(plain.detach().contiguous(), ROWS)
            known = self._packed[weight.data_ptr()] = weight._version, packed
        return known[1]

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


def pack_by_default(model: PreTrainedModel) -> bool:
    """Whether packing pays here: on a CPU in float32, with memory to spare."""
    layers = PackedLinears(model)
    return bool(layers.layers) and layers.nbytes * SPARE < psutil.virtual_memory().available


def _can_pack(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
        return False  # a layer of another library, or one that is wrapped already (offloaded weights)
    weight = weight_of(layer)
    usable: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return usable and weight.device.type == "cpu" and weight.dtype == torch.float32


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
            weight = self.packed.packed_weight(self.layer)
            result = torch.ops.mkldnn._linear_pointwise(x, weight, self.layer.bias, "none", [], "")
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        """A copy of the model that is made meanwhile gets the layer's own method."""
        return MethodType(type(self.layer).forward, memo.get(id(self.layer), self.layer))

    def __reduce__(self) -> Any:
        return MethodType, (type(self.layer).forward, self.layer)
