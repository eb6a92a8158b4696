"""Drawing the noise of consecutive positions with few calls: on a GPU several of them at once, as one CUDA graph.

Each position is drawn by a call of its own, as `generate` draws it: one call for all of them would give other numbers.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from lookfar.core.locks import fork_safe_lock

AHEAD = 32  # positions that are drawn at once
AHEAD_BYTES = 16 << 20  # as far as they fit: in a large batch, one position serves many requests
MAX_GRAPHS = 8  # that are kept, each with its buffer
PHILOX_BYTES = 16  # of the state of a GPU's generator: its seed, and how far it has come

Key = tuple[torch.device, int, int, int, int]  # device, stream, positions, requests, vocabulary


class NoiseDraws:
    """Draws noise, [positions, requests, vocabulary], from given states of a generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)

    def positions(self, batch: int, width: int) -> int:
        """Return how many positions to draw at once."""
        if self._device.type != "cuda":
            return 1  # a draw takes as long as its numbers do
        return max(1, min(AHEAD, AHEAD_BYTES // max(4 * batch * width, 1)))

    def seed(self, seed: int) -> torch.Tensor:
        """Return the state of a generator after seeding."""
        return self._generator.manual_seed(seed).get_state()

    def draw(self, state: torch.Tensor, shape: tuple[int, int, int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Draw from a state on; also return the states after each position."""
        together = shape[0] > 1 and self._device.type == "cuda"
        graph = _graph_for(self._device, shape) if together else None
        if graph is not None:
            noise, end = graph.draw(state)
            return noise, states_between(state, end, shape[0])
        noise = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._generator.set_state(state)
        states = []
        for part in noise:
            part.exponential_(1, generator=self._generator)
            states.append(self._generator.get_state())
        return noise, states


class DrawingGraph:
    """The draws of several positions as a CUDA graph, from any state."""

    def __init__(self, device: torch.device, shape: tuple[int, int, int]) -> None:
        self._lock = fork_safe_lock()
        self._generator = torch.Generator(device)
        self._noise = torch.empty(shape, dtype=torch.float32, device=device)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(self._generator)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the device
            try:
                for part in self._noise:
                    part.exponential_(1, generator=self._generator)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(side)

    def draw(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noise from a state on, and the state behind it."""
        with self._lock:
            self._generator.set_state(state)
            self._graph.replay()
            return self._noise.clone(), self._generator.get_state()


_graphs: OrderedDict[Key, DrawingGraph | None] = OrderedDict()  # None: drawn once, captured if it is drawn again
_refused: set[Key] = set()  # what could not be captured
_known = fork_safe_lock()


def _graph_for(device: torch.device, shape: tuple[int, int, int]) -> DrawingGraph | None:
    """Return the graph that draws a shape on the current stream; None when it is first asked for."""
    key = device, torch.cuda.current_stream(device).stream_id, *shape
    with _known:
        if key not in _graphs:
            _graphs[key] = None
            if len(_graphs) > MAX_GRAPHS:
                _graphs.popitem(last=False)
        elif _graphs[key] is None and key not in _refused:
            try:
                _graphs[key] = DrawingGraph(device, shape)
            except RuntimeError:
                _refused.add(key)
        _graphs.move_to_end(key)
        return _graphs[key]


def states_between(start: torch.Tensor, end: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return the states of a GPU's generator after each of `count` equal draws."""
    assert start.numel() == PHILOX_BYTES
    seed, first = start.numpy().view(np.int64).tolist()
    step = (int(end.numpy().view(np.int64)[1]) - first) // count
    table = np.array([(seed, first + step * i) for i in range(1, count + 1)], np.int64)
    return list(torch.from_numpy(table.view(np.uint8)))
