"""The little of LLVM that the instructions of this package are written with."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

IS_X86 = platform.machine() in ("x86_64", "AMD64")
IS_ARM = platform.machine() in ("aarch64", "arm64", "ARM64")
FLOAT, BYTE, SHORT, INT, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)

# A function whose body is not compiled but returns the type of a call and the code that emits it.
instruction: Any = intrinsic


def external(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of LLVM or of the C library by its name and types."""
    find: Any = cgutils.get_or_insert_function
    return find(builder.module, ir.FunctionType(result, arguments), name)
