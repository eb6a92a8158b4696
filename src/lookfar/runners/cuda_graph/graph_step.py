"""Flat steps of one shape as CUDA graphs: the host writes a block of numbers, replays, and reads a block of results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from lookfar.core.arrays import Ints
from lookfar.core.jit import jit
from lookfar.core.plan import RowSampler, StepPlan
from lookfar.kernels import reference
from lookfar.kernels.attention_op import NAME
from lookfar.kernels.row_sum_mode import RowSums
from lookfar.kernels.row_table import KV_LEN, MAX_PATH, PREFIX_LEN, TREE_PATH, WINDOW_START
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.models.hidden_states import recorded
from lookfar.runners.base import StepResult
from lookfar.runners.cuda_graph.capture import capture_graph
from lookfar.runners.cuda_graph.compiled_layers import CompiledLayers
from lookfar.runners.cuda_graph.flat_step import FlatStep
from lookfar.runners.cuda_graph.fused_linear import FusedLinears
from lookfar.runners.cuda_graph.graph_sampler import GraphSampler

MAX_SAMPLERS = 8  # graphs of samplers that are kept for one shape of step


@jit
def set_moves(table, about, sources):  # type: ignore[no-untyped-def]
    """Describe the moves of some slots to the kernel that carries them out."""
    table[:, 0] = -1
    first = 0
    for i in range(len(about)):
        slot, count, target = about[i]
        row = table[i]
        row[:] = -1
        row[0] = slot
        for j in range(count):
            row[1 + j], row[1 + MAX_PATH + j] = sources[first + j], target + j
        first += count


@dataclass
class LayerOptions:
    """How the layers of a model are run in captured steps."""

    fused: FusedLinears
    compiled: CompiledLayers | None = None
    experts: str | None = None  # how experts are multiplied, if not as the model does


class CapturedGraph(NamedTuple):
    """A captured graph, and the tensors that it writes."""

    logits: torch.Tensor
    hidden: torch.Tensor | None
    results: torch.Tensor
    replay: Callable[[], None]


class GraphStep(FlatStep):
    """A flat step as CUDA graphs, one for each number of predictions. Without a GPU the step runs uncaptured."""

    def __init__(self, model: BoundModel, cache: SlotKVCache, rows: int, batch: int, layers: LayerOptions) -> None:
        super().__init__(model, cache, rows, batch)
        self.layers = layers
        self.logits = torch.empty(0)
        self.hidden: torch.Tensor | None = None  # [rows, hidden] of models that can draft from them
        self.results = torch.empty(0)  # [rows, 1 + 2k] on the host
        self.captured: set[int] = set()  # numbers of predictions
        self._graphs: dict[int, CapturedGraph] = {}  # by k
        self._samplers: dict[Hashable, GraphSampler] = {}  # by k and processors

    def fill(self, plan: StepPlan) -> bool:
        if not super().fill(plan):
            return False
        if not self.on_gpu:
            return True  # the cache moves positions itself
        set_moves(self.host_moves, *self.cache.take_moves(len(self.host_moves), MAX_PATH))
        return True

    def run(self) -> torch.Tensor:
        """Run the forward pass, compiled if that was asked for."""
        with recorded(self.model.model, self.model.has_heads) as states:
            logits = self._run()
        self.hidden = states.calls[0][0] if states is not None else None
        return logits

    def _run(self) -> torch.Tensor:
        layers = self.layers
        with self.model.attending(NAME), self.model.experts(layers.experts), layers.fused.in_use():
            if layers.compiled is None:
                with RowSums() if layers.fused.exact else nullcontext():
                    return self.forward(self.model.model.forward)
            layers.compiled.select_layer = self.writer.select_layer
            return self.forward(layers.compiled)

    def launch(self, k: int) -> None:
        """Launch the step that `fill` described, with the top `k` tokens of each row as results."""
        if not self.on_gpu:
            self.cache.apply_moves()
            self.logits = self.run()
            self.results = reference.top_k(self.logits, k)
            return
        self.logits, self.hidden, self.results, replay = self._graphs[k]
        replay()

    def capture(self, k: int, move: Callable[[torch.Tensor], None], pool: Any) -> None:
        """Capture a step of nothing but padding."""
        from lookfar.kernels.topk import top_k

        self.clear()
        self.host_moves[:] = -1
        results = torch.zeros(self.rows, 1 + 2 * k, dtype=torch.int32, pin_memory=True)

        def step() -> torch.Tensor:
            self.device.copy_(self.host, non_blocking=True)
            move(self.moves)
            logits = self.run()
            results.copy_(top_k(logits, k), non_blocking=True)
            return logits

        logits, replay = capture_graph(step, pool)
        self._graphs[k] = CapturedGraph(logits, self.hidden, results, replay)

    def probe(self, k: int) -> torch.Tensor:
        """Return the bits of the logits of a captured step in which every row is token 0 and sees itself alone."""
        self.clear()
        self.host_moves[:] = -1
        table = self.table.arrays.tables[:, : self.rows]
        table[..., KV_LEN], table[..., PREFIX_LEN], table[..., WINDOW_START] = 1, 0, 0
        table[..., TREE_PATH] = self.table.spare  # where padding writes its keys and values
        self.launch(k)
        torch.cuda.current_stream(self.device.device).synchronize()  # the host will fill in another step
        return self.logits.view(torch.int16 if self.logits.element_size() == 2 else torch.int32)

    def sampler_for(self, k: int, sampler: RowSampler, pool: Any) -> GraphSampler:
        """Return what samples behind this step."""
        key = k, sampler.fingerprint
        if key not in self._samplers:
            if len(self._samplers) == MAX_SAMPLERS:
                del self._samplers[next(iter(self._samplers))]  # the oldest
            self._samplers[key] = GraphSampler(self.logits, sampler.processors, pool)
        return self._samplers[key]


@dataclass
class PendingGraphStep:
    """A replayed graph."""

    step: GraphStep
    plan: StepPlan
    k: int
    sampler: GraphSampler | None
    started: float
    launch_seconds: float
    is_warm: bool

    def result(self) -> StepResult:
        """Wait for the device, and read the results of all rows."""
        step, plan, k = self.step, self.plan, self.k
        if step.on_gpu:
            torch.cuda.current_stream(step.device.device).synchronize()
        results, all_logits, states = step.results.numpy(), step.logits, step.hidden
        starts = np.cumsum([0, *plan.lengths[:-1]])
        first_logit = (1 + results.shape[1]) // 2  # there may be more than k predictions

        def logits(request: int, rows: Ints) -> torch.Tensor:
            start = starts[request]
            return all_logits[start + rows[0] : start + rows[-1] + 1]

        def hidden(request: int, rows: Ints) -> torch.Tensor:
            assert states is not None
            return states[torch.from_numpy(starts[request] + rows).to(states.device)]  # a copy: graphs write again

        return StepResult(
            starts,
            results[:, 0].astype(np.int64),
            logits,
            # Copies, because the next step overwrites the results; contiguous even if there is one row, because
            # compiled code is compiled for a layout.
            results[:, 1 : 1 + k].copy() if k else None,
            results[:, first_logit : first_logit + k].copy().view(np.float32) if k else None,
            self.sampler.sampled.numpy().astype(np.int64) if self.sampler is not None else None,
            step.rows,
            perf_counter() - self.started,
            self.launch_seconds,
            hidden if plan.hidden and states is not None else None,
            self.is_warm,
        )
