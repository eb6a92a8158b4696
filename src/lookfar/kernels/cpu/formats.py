"""The formats of packed weights: how many bytes a matrix takes, whether a format holds it without loss, and writing it.

Packed weights are panels of 16 rows of a matrix (columns of the product), as `tiles.py` describes them. The last panel
is filled up with zeros.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lookfar.core.jit import jit
from lookfar.kernels.cpu.tiles import BFLOAT16, FLOAT16, FLOAT32, GROUP, GROUP_BYTES, UINT8
from lookfar.kernels.cpu.vectors import HAS_HALF, LANES

Bytes = npt.NDArray[np.uint8]

FORMATS = (UINT8, BFLOAT16, FLOAT16, FLOAT32) if HAS_HALF else (UINT8, BFLOAT16, FLOAT32)  # the smallest first
NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16", FLOAT16: "float16", UINT8: "uint8"}
LARGEST = 255.0  # the most units that a byte counts
UPPER = int(sys.byteorder == "little")  # which half of a float32 has its upper 16 bits


def format_of(weights: Seq[torch.Tensor], rows: int = 0) -> int:
    """Return the smallest format that holds some float32 matrices, or about `rows` rows of each."""
    parts = [weight[:: max(len(weight) // rows, 1)] if rows else weight for weight in weights]
    return next(kind for kind in FORMATS if all(fits(part, kind) for part in parts))


def fits(weight: torch.Tensor, kind: int) -> bool:
    """Whether a format holds a float32 matrix without loss."""
    values: Any = np.ascontiguousarray(weight.detach().numpy())
    if kind == UINT8:
        return values.shape[1] % GROUP == 0 and bool(fits_uint8(values))
    if kind == BFLOAT16:
        return bool(fits_bfloat16(values.view(np.uint32)))
    return kind == FLOAT32 or torch.equal(weight.half().float(), weight)


def packed_size(weight: torch.Tensor, kind: int) -> int:
    """Return the bytes of a packed matrix."""
    rows, columns = weight.shape
    return -(-rows // LANES) * int(panel_size(kind, columns))


def write_panels(weight: torch.Tensor, kind: int, to: Bytes) -> bool:
    """Pack a matrix; returns False if its numbers do not fit the format."""
    values: Any = np.ascontiguousarray(weight.detach().numpy())
    if kind == UINT8:
        return bool(write_uint8(values, to.view(np.float32), to))
    if not fits(weight, kind):
        return False
    if kind == FLOAT32:
        write_in_order(values, to.view(np.float32))
    else:
        halves = weight.detach().half().numpy() if kind == FLOAT16 else values.view(np.uint16)[:, UPPER::2]
        write_in_order(halves.view(np.uint16), to.view(np.uint16))
    return True


@jit
def panel_size(kind, length):  # type: ignore[no-untyped-def]
    """Return the bytes of a panel."""
    if kind == UINT8:
        return length // GROUP * GROUP_BYTES
    return length * LANES * (4 if kind == FLOAT32 else 2)


@jit
def unit_of(values):  # type: ignore[no-untyped-def]
    """Return an offset and a unit: every value is offset + n · unit, n = 0 … 255. The unit is 0 if there is none."""
    least, most = np.float64(values[0]), np.float64(values[0])  # their differences are exact
    for value in values:
        if value != value:  # NaN
            return np.float32(0.0), np.float32(0.0)
        least, most = min(least, value), max(most, value)
    width, step = most - least, np.inf
    if width == 0:
        return np.float32(least), np.float32(1.0)
    for value in values:
        if value > least:
            step = min(step, value - least)
    count = 1
    while width * count <= LARGEST * step and width < np.inf:
        unit, fits = np.float32(step / count), True
        inverse = 1.0 / unit
        for value in values:
            if np.rint((value - least) * inverse) * unit + least != value:
                fits = False
                break
        if fits:
            return np.float32(least), unit
        count += 1
    return np.float32(least), np.float32(0.0)


@jit
def fits_uint8(weight):  # type: ignore[no-untyped-def]
    """Whether every group of a row has a unit."""
    for row in range(len(weight)):
        for first in range(0, weight.shape[1], GROUP):
            if unit_of(weight[row, first : first + GROUP])[1] == 0:
                return False
    return True


@jit
def fits_bfloat16(bits):  # type: ignore[no-untyped-def]
    """Whether the lower halves of all numbers are zero."""
    for row in bits:
        found = np.uint32(0)
        for value in row:
            found |= value & np.uint32(0xFFFF)
        if found:
            return False
    return True


@jit
def write_in_order(weight, to):  # type: ignore[no-untyped-def]
    """Write [panel][k][16]."""
    rows, length = weight.shape
    for first in range(0, rows, LANES):
        for k in range(length):
            place = first * length + k * LANES
            for lane in range(LANES):
                to[place + lane] = weight[first + lane, k] if first + lane < rows else 0


@jit
def write_uint8(weight, floats, numbers):  # type: ignore[no-untyped-def]
    """Write [panel][group]; both arrays are views of the same bytes. Returns False if a group has no unit."""
    rows, length = weight.shape
    size = length // GROUP * GROUP_BYTES
    for first in range(0, rows, LANES):
        for lane in range(LANES):
            for group in range(length // GROUP):
                place = first // LANES * size + group * GROUP_BYTES
                offset, unit = np.float32(0.0), np.float32(1.0)
                if first + lane < rows:
                    values = weight[first + lane, group * GROUP : (group + 1) * GROUP]
                    offset, unit = unit_of(values)
                    if unit == 0:
                        return False
                    inverse = 1.0 / np.float64(unit)
                    for k in range(GROUP):
                        number = np.rint((np.float64(values[k]) - offset) * inverse)
                        numbers[place + (8 + k) * LANES + lane] = np.uint8(number)
                else:
                    numbers[place + 8 * LANES + lane : place + GROUP_BYTES : LANES] = 0
                floats[place // 4 + lane], floats[place // 4 + LANES + lane] = offset, unit
    return True
