"""Arrays by address, so that one compiled call can work on the arrays of any number of requests.

Numba takes a fixed number of arrays. A request keeps its state in arrays of its own, and a call for a batch gets their
addresses. The caller keeps the arrays alive until the call returns.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from lookfar.core.jit import inline_jit

carray: Any = vars(numba)["carray"]


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of a contiguous array."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def _pointer_to(typing_context, address, kind):  # type: ignore[no-untyped-def]
    """Return an address as a pointer to a kind of numbers."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer = types.CPointer(kind.dtype)  # type: ignore[no-untyped-call]
    return pointer(types.int64, kind), generate


pointer_to = cast("Any", intrinsic(_pointer_to))


@inline_jit
def ints_at(address, count):  # type: ignore[no-untyped-def]
    """Return the 32-bit integers at an address."""
    return carray(pointer_to(address, np.int32), count)


@inline_jit
def longs_at(address, count):  # type: ignore[no-untyped-def]
    """Return the 64-bit integers at an address."""
    return carray(pointer_to(address, np.int64), count)


@inline_jit
def floats_at(address, count):  # type: ignore[no-untyped-def]
    """Return the 32-bit floating-point numbers at an address."""
    return carray(pointer_to(address, np.float32), count)


@inline_jit
def bytes_at(address, count):  # type: ignore[no-untyped-def]
    """Return the bytes at an address."""
    return carray(pointer_to(address, np.uint8), count)
