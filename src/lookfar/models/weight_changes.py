"""Detection of changed weights, for copies that were made of them.

torch counts the changes of a tensor, but not those that are made through `.data`: by optimisers, by adapters that are
merged, by hand. So a weight is also recognised by its address and by a sample of its values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from lookfar.core.jit import jit


class WeightState(NamedTuple):
    """What tells a weight from a changed one. `sample` covers every row and every column of a matrix."""

    address: int
    version: int
    shape: tuple[int, ...]
    sample: int = 0

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightState:
        """Return the state of a float32 matrix on the CPU.

        A change of a whole row or column, and so of a whole matrix, is always seen, however it was made. A change of
        single values through `.data` may be missed.
        """
        sample = sample_bits(weight.detach().numpy().view(np.uint32))
        return cls(weight.data_ptr(), _version(weight), tuple(weight.shape), int(sample))

    def may_be_of(self, weight: torch.Tensor) -> bool:
        """Whether a weight is unchanged as far as torch knows: a microsecond, without changes through `.data`."""
        return weight.data_ptr() == self.address and _version(weight) == self.version


def _version(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


@jit
def sample_bits(matrix):  # type: ignore[no-untyped-def]
    """Hash the values along the diagonals of a matrix: at least one of every row and of every column."""
    rows, columns = matrix.shape
    found = np.uint64(14695981039346656037)
    row = column = 0
    for _ in range(max(rows, columns)):
        found = (found ^ np.uint64(matrix[row, column])) * np.uint64(1099511628211)
        row = row + 1 if row + 1 < rows else 0
        column = column + 1 if column + 1 < columns else 0
    return found
