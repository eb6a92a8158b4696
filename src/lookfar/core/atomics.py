"""Memory that several threads share in compiled code: counters, flags, and ways to wait for each other."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import Any

from llvmlite import ir
from numba import types

from lookfar.core.jit import jit
from lookfar.core.llvm import INT, IS_X86, LONG, external, instruction

SPINS = 20_000  # looks before a waiting thread lets others run: about half a millisecond
CACHE_LINE = 64  # bytes that a core gets to itself when it writes to one of them
CAN_YIELD = os.name == "posix"


def _update(operation: str) -> Any:
    """Return an instruction that changes the number at an address for all threads, and returns what it was before."""

    @instruction
    def update(typing_context: Any, place: Any, value: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
            pointer = builder.inttoptr(arguments[0], LONG.as_pointer())
            return builder.atomic_rmw(operation, pointer, arguments[1], "seq_cst")

        return types.int64(types.int64, types.int64), emit

    return update


take, swap = _update("add"), _update("xchg")  # adds a number, or puts it in place of the one that is there


@instruction
def look(typing_context: Any, counter: Any) -> Any:
    """Read the counter at an address, as other threads left it."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], LONG.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), emit


@instruction
def relax(typing_context: Any) -> Any:
    """Let the other half of a core run for a moment."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        if IS_X86:
            builder.call(external(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), emit


@instruction
def let_others_run(typing_context: Any) -> Any:
    """Give the core to another thread of the machine, if one waits for it."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        if CAN_YIELD:
            builder.call(external(builder, "sched_yield", INT), [])
        return context.get_dummy_value()

    return types.void(), emit


@jit
def pause(spins):  # type: ignore[no-untyped-def]
    """Wait a moment before the next look; after many looks, let other threads run. Returns the number of looks."""
    if spins < SPINS:
        relax()
    else:
        let_others_run()
    return spins + 1
