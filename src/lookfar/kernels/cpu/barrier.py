"""The barrier of the threads that compute a step on a CPU."""

from __future__ import annotations

from lookfar.core.atomics import look, pause, take
from lookfar.core.jit import jit


@jit
def wait_for_all(counter, reached):  # type: ignore[no-untyped-def]
    """Wait until the counter at an address has reached a value, having added 1 to it."""
    take(counter, 1)
    spins = 0
    while look(counter) < reached:
        spins = pause(spins)
