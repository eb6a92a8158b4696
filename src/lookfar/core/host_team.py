"""Threads that share the host's part of a step with the thread that runs it, while a GPU waits for the next one.

Compiled code divides its work into parts and calls `run_parts`. The caller takes parts too, so a helper that comes
late, or not at all, costs nothing. Helpers look for work for a millisecond or two after the last job, and then sleep.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lookfar.core.addresses import address_of
from lookfar.core.arrays import Ints
from lookfar.core.atomics import CACHE_LINE, look, pause, relax, swap, take
from lookfar.core.cores import cores
from lookfar.core.jit import jit
from lookfar.core.llvm import BYTE, INT, LONG, external, instruction

MOST_HELPERS = 3
PARTS_EACH = 2  # for each thread, so that one that is late holds up the others less
CORES_EACH = 4  # cores of the machine for each thread that works on a step
IDLE_SPINS = 40_000  # looks before a helper sleeps: one or two milliseconds, which is how long a GPU computes a step

BYTES = 8  # of a number that the threads share
LINE = CACHE_LINE // BYTES  # numbers on a cache line
# Each of them is on a cache line of its own. JOB and DATA are addresses. Every helper has two lines from ASLEEP on:
# whether it sleeps, and its semaphore.
JOB, DATA, PARTS, NEXT, OPEN, ACTIVE, CALLS, STOP, BUSY, HELPERS, ASLEEP, SEMAPHORES = (LINE * i for i in range(12))
Team = tuple[int, int]  # for compiled code: an address, and the number of parts to divide work into
ALONE: Team = (0, 1)


@instruction
def run_job(typing_context: Any, job: Any, data: Any, part: Any) -> Any:
    """Call the function at an address that `job_of` has made."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        function = ir.FunctionType(ir.VoidType(), (BYTE.as_pointer(), LONG)).as_pointer()
        job, data, part = arguments
        builder.call(builder.inttoptr(job, function), [builder.inttoptr(data, BYTE.as_pointer()), part])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _semaphore(name: str) -> Any:
    @instruction
    def call(typing_context: Any, semaphore: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
            pointer = builder.inttoptr(arguments[0], BYTE.as_pointer())
            builder.call(external(builder, name, INT, BYTE.as_pointer()), [pointer])
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return call


wait_for_semaphore, post_semaphore = _semaphore("sem_wait"), _semaphore("sem_post")


@jit
def work(team):  # type: ignore[no-untyped-def]
    """Do parts of the present job until all are taken."""
    part = take(team + BYTES * NEXT, 1)
    while part < look(team + BYTES * PARTS):
        run_job(look(team + BYTES * JOB), look(team + BYTES * DATA), part)
        part = take(team + BYTES * NEXT, 1)


@jit
def run_parts(team, parts, job):  # type: ignore[no-untyped-def]
    """Run a job (`job_of`) on the threads of a team, 0: on this one; returns when all of its parts are done."""
    function, data = job
    if not team or swap(team + BYTES * BUSY, 1):  # by another thread of this process
        for part in range(parts):
            run_job(function, data, part)
        return
    swap(team + BYTES * JOB, function)
    swap(team + BYTES * DATA, data)
    swap(team + BYTES * PARTS, parts)
    swap(team + BYTES * NEXT, 0)
    swap(team + BYTES * OPEN, 1)
    take(team + BYTES * CALLS, 1)
    wake(team)
    work(team)
    # A helper enters, then looks whether the job is open. So either it is seen here, or it sees that the job is closed.
    swap(team + BYTES * OPEN, 0)
    spins = 0
    while look(team + BYTES * ACTIVE):
        spins = pause(spins)
    swap(team + BYTES * BUSY, 0)


@jit
def wake(team):  # type: ignore[no-untyped-def]
    """Wake the helpers that sleep."""
    for helper in range(look(team + BYTES * HELPERS)):
        if swap(team + BYTES * (ASLEEP + LINE * 2 * helper), 0):
            post_semaphore(team + BYTES * (SEMAPHORES + LINE * 2 * helper))


def _help(team, helper):  # type: ignore[no-untyped-def]
    """Help with jobs until the team is stopped."""
    asleep = team + BYTES * (ASLEEP + LINE * 2 * helper)
    calls = spins = 0
    while not look(team + BYTES * STOP):
        if look(team + BYTES * CALLS) != calls:
            calls, spins = look(team + BYTES * CALLS), 0
            take(team + BYTES * ACTIVE, 1)
            if look(team + BYTES * OPEN):
                work(team)
            take(team + BYTES * ACTIVE, -1)
        elif spins < IDLE_SPINS:
            spins += 1
            relax()
        else:
            swap(asleep, 1)
            called = look(team + BYTES * CALLS) != calls or look(team + BYTES * STOP)
            if not (called and swap(asleep, 0)):  # otherwise no post is on its way
                wait_for_semaphore(team + BYTES * (SEMAPHORES + LINE * 2 * helper))
            spins = 0


help_with_jobs = jit(_help, nogil=True)


@instruction
def job_of(typing_context: Any, function: Any, data: Any) -> Any:
    """Return the addresses of a job that calls the compiled `function(data, part)`, and of its `data`.

    They hold until the caller returns. The function must not raise, and must not make or keep arrays (`borrowing_jit`).
    """
    inner = function.get_call_type(typing_context, (data, types.int64), {})
    result = types.UniTuple(types.int64, 2)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Seq[Any]) -> Any:
        job = _called_by_address(context, builder, function, inner)
        place = cgutils.alloca_once_value(builder, arguments[1])
        return context.make_tuple(builder, result, [builder.ptrtoint(pointer, LONG) for pointer in (job, place)])

    return result(function, data), emit


def _called_by_address(context: Any, builder: ir.IRBuilder, function: Any, signature: Any) -> ir.Function:
    """Return a C function of an address of the arguments and a part that calls a compiled function."""
    compiled = function.dispatcher.overloads[signature.args]
    context.add_linking_libs([compiled.library])
    name = f"part_of_{compiled.fndesc.mangled_name}_{len(builder.module.globals)}"
    made = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), (BYTE.as_pointer(), LONG)), name)
    made.linkage = "internal"
    inside = ir.IRBuilder(made.append_basic_block())
    data_type = context.get_value_type(signature.args[0])
    data = inside.load(inside.bitcast(made.args[0], data_type.as_pointer()))
    callee = context.declare_function(builder.module, compiled.fndesc)
    context.call_conv.call_function(inside, callee, signature.return_type, signature.args, (data, made.args[1]))
    inside.ret_void()
    return made


class HostTeam:
    """Helpers of this process, which wait for jobs in compiled code."""

    def __init__(self, helpers: int) -> None:
        self.size = 1 + helpers
        self._shared: Ints = np.zeros(SEMAPHORES + LINE * 2 * max(helpers, 1) + LINE, np.int64)
        first = -(self._shared.ctypes.data // BYTES) % LINE  # on a cache line
        self._numbers = self._shared[first:]
        self.address = address_of(self._numbers)
        self._numbers[HELPERS] = helpers  # a semaphore of the C library begins as zeros
        self._threads = [threading.Thread(target=self._help, args=(i,), daemon=True) for i in range(helpers)]
        for number, thread in enumerate(self._threads):
            thread.name = f"lookfar-host-{number + 1}"
            thread.start()

    def _help(self, helper: int) -> None:
        help_with_jobs(self.address, helper)

    def close(self) -> None:
        """End the helpers: they run compiled code, which does not outlive the interpreter."""
        self._numbers[STOP] = 1
        wake(self.address)
        for thread in self._threads:
            thread.join(timeout=1.0)


class _Present(threading.local):
    """Whether the work of this thread is shared."""

    shares = False


_present = _Present()
_starting = threading.Lock()
_team: HostTeam | None = None


def can_help() -> int:
    """Return how many threads may help on this machine."""
    if asked := os.environ.get("LOOKFAR_HOST_THREADS", ""):
        threads = int(asked) if asked.isdigit() else 1
    else:
        threads = min(cores() // CORES_EACH, 1 + MOST_HELPERS)
    return max(threads - 1, 0) if sys.platform == "linux" else 0


def present_team(pieces: int) -> Team:
    """Return the team of this thread for work that can be divided into so many pieces."""
    if not _present.shares or pieces < 2:
        return ALONE
    team = _started()
    return (team.address, min(pieces, PARTS_EACH * team.size)) if team.size > 1 else ALONE


def wake_helpers() -> None:
    """Have the helpers of this thread look for work: called some time before there is any, since waking takes long."""
    if _present.shares and _team is not None and _team.size > 1:
        wake(_team.address)


@contextmanager
def sharing_work(shares: bool = True) -> Iterator[None]:
    """Let helpers share the compiled work of this thread."""
    before, _present.shares = _present.shares, shares
    try:
        yield
    finally:
        _present.shares = before


def _started() -> HostTeam:
    global _team
    if _team is None:
        with _starting:
            if _team is None:
                _team = HostTeam(can_help())
                atexit.register(_team.close)
    return _team


def _forget_team() -> None:
    """A forked process has none of the threads, and perhaps a lock that is held."""
    global _team, _starting
    _team, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_team)
