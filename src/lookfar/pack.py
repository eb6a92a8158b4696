"""Linear layers of a CPU model with weights packed once, for the time of a forward.

torch's own float32 `linear` packs its weights anew in every call with two rows or more. oneDNN can keep them packed:
one more copy of the weights, and eight rows cost about what one row costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
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
        self._packed: dict[int, tuple[int, torch.Tensor]] = {}  # where the weight lies → its version, packed
        self._forwards: list[Callable[[torch.Tensor], torch.Tensor]] = [_forward(self, layer) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """The memory that the packed copies take, or will take."""
        weights = {weight_of(layer).data_ptr(): weight_of(layer) for layer in self.layers}
        return sum(weight.numel() * weight.element_size() for weight in weights.values())

    def of(self, layer: nn.Module) -> torch.Tensor:
        """The packed weight of a layer; packed anew if the weight has changed since."""
        weight = weight_of(layer)
        known = self._packed.get(weight.data_ptr())
        if known is None or known[0] != weight._version:
            with torch.no_grad():
                plain = weight.t() if isinstance(layer, Conv1D) else weight
                packed = torch.ops.mkldnn._reorder_linear_weight(plain.detach().contiguous(), ROWS)
            known = self._packed[weight.data_ptr()] = weight._version, packed
        return known[1]

    def in_use(self) -> AbstractContextManager[None]:
        """While the block runs, the layers compute with their packed weights; then the model is as it was."""
        return forwards_replaced(self.layers, self._forwards)


@contextmanager
def forwards_replaced(layers: Seq[nn.Module], forwards: Seq[Callable[..., Any]]) -> Iterator[None]:
    """While the block runs, each layer has another forward."""
    for layer, forward in zip(layers, forwards, strict=True):
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def pack_by_default(model: PreTrainedModel) -> bool:
    """Does packing pay here? On a CPU in float32, with memory to spare."""
    layers = PackedLinears(model)
    return bool(layers.layers) and layers.nbytes * SPARE < psutil.virtual_memory().available


def _can_pack(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
        return False  # someone else's layer, or one that is wrapped already (offloaded weights)
    weight = weight_of(layer)
    usable: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return usable and weight.device.type == "cpu" and weight.dtype == torch.float32


def weight_of(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _forward(packed: PackedLinears, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = linear(x, packed.of(layer), layer.bias, "none", [], "")
        return result

    return forward
