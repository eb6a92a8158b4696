"""Arrays by address, so that one compiled call can work on the arrays of any number of requests.

Numba takes a fixed number of arrays. A request keeps its state in arrays of its own, and a call for a batch gets their
addresses. The caller keeps the arrays alive until the call returns.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from lookfar.core.jit import inline_jit


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of a contiguous array."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def _array_at(typing_context, address, shape, kind):  # type: ignore[no-untyped-def]
    """Return the numbers at an address as an array: `numba.carray`, which a `borrowing_jit` function cannot call."""
    dimensions = len(shape) if isinstance(shape, types.BaseTuple) else 1
    array: Any = vars(types)["Array"](kind.dtype, dimensions, "C")
    pointer: Any = vars(types)["CPointer"](kind.dtype)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        start = builder.inttoptr(arguments[0], context.get_value_type(pointer))
        return np_cfarray(context, builder, array(pointer, shape), (start, arguments[1]))

    return array(types.int64, shape, kind), generate


np_cfarray: Any = vars(arrayobj)["np_cfarray"]
array_at = cast("Any", intrinsic(_array_at))


@inline_jit
def ints_at(address, shape):  # type: ignore[no-untyped-def]
    """Return the 32-bit integers at an address."""
    return array_at(address, shape, np.int32)


@inline_jit
def longs_at(address, shape):  # type: ignore[no-untyped-def]
    """Return the 64-bit integers at an address."""
    return array_at(address, shape, np.int64)


@inline_jit
def floats_at(address, shape):  # type: ignore[no-untyped-def]
    """Return the 32-bit floating-point numbers at an address."""
    return array_at(address, shape, np.float32)


@inline_jit
def bytes_at(address, shape):  # type: ignore[no-untyped-def]
    """Return the bytes at an address."""
    return array_at(address, shape, np.uint8)
