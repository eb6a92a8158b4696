"""Names for the NumPy array types that pass between modules."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def stack(parts: Seq[Int32s]) -> Int32s:
    """Stack arrays [k, depth] of several depths, with -1 behind the shorter rows."""
    if len(parts) == 1:
        return parts[0]
    deepest = max((part.shape[1] for part in parts), default=0)
    stacked = np.full((sum(map(len, parts)), deepest), -1, np.int32)
    row = 0
    for part in parts:
        stacked[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return stacked
