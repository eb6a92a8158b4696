"""Capturing a function as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def capture_graph(run: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """Run a function twice as a warm-up, then capture it; return its result and the function that replays it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
            result = run()
    except Exception:
        # A failed capture leaves the random generator waiting for its end; a successful one ends it.
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
        raise
    return result, graph.replay
