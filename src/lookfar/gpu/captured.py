"""One shape of step as CUDA graphs: the host writes a block of numbers, replays, and reads a block of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookfar.answers import Answers
from lookfar.arrays import Ints
from lookfar.cache import SlotCache
from lookfar.gpu import twin
from lookfar.gpu.interface import NAME
from lookfar.gpu.packed import PackedStep
from lookfar.gpu.table import NEAR
from lookfar.model import BoundModel
from lookfar.tree import Plan

if TYPE_CHECKING:
    from lookfar.gpu.drawing import Drawing
    from lookfar.gpu.graphs import CapturedSteps
    from lookfar.sequence import Sequence

WORTH_IT = 8  # times that tokens are drawn with some processors before that is captured too
DRAWINGS = 8  # kept for one shape of step


class CapturedStep(PackedStep):
    """A packed step as graphs: one for each number of predictions that is asked for."""

    def __init__(self, model: BoundModel, cache: SlotCache, rows: int, batch: int, steps: CapturedSteps) -> None:
        super().__init__(model, cache, rows, batch)
        self.steps = steps
        self.logits = torch.empty(0)
        self.back = torch.empty(0)
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor, Callable[[], None]]] = {}
        self._asked: Counter[Hashable] = Counter()  # how often tokens were to be drawn, by top and processors
        self._drawings: dict[Hashable, Drawing | None] = {}

    def fill(self, plan: Plan) -> bool:
        if not super().fill(plan):
            return False
        if not self.on_gpu:
            return True  # moved by the cache itself
        self.host_moves[:, 0] = -1
        for i in range(plan.batch):
            cells = self.cache.claim(plan.first_slot + i, NEAR)
            if cells is not None:
                orders = self.host_moves[i]
                orders[:] = -1
                orders[0] = plan.first_slot + i
                orders[1 : 1 + len(cells[0])], orders[1 + NEAR : 1 + NEAR + len(cells[1])] = cells
        return True

    def run(self) -> torch.Tensor:
        """The forward, compiled if that was asked for."""
        with self.model.attending(NAME), self.model.experts(self.steps.experts), self.steps.sisters.in_use():
            if self.steps.compiled is None:
                return self.forward(self.model.model.forward)
            self.steps.compiled.turn = self.packed.turn_of
            return self.forward(self.steps.compiled)

    def launch(self, top: int) -> None:
        """Run what was filled in."""
        if not self.on_gpu:
            self.cache.settle()
            self.logits = self.run()
            self.back = twin.best(self.logits, top)
            return
        self.logits, self.back, replay = self._graphs[top]
        replay()

    def ready(self, top: int) -> bool:
        """Is there a graph? Without a GPU none is needed."""
        return top in self._graphs or not self.on_gpu

    def capture(self, top: int, mover: Callable[[torch.Tensor], None], pool: Any) -> None:
        """Record a step of padding alone."""
        from lookfar.gpu.best import best

        self.clear()
        self.host_moves[:] = -1
        back = torch.zeros(self.rows, 1 + 2 * top, dtype=torch.int32, pin_memory=True)

        def step() -> torch.Tensor:
            self.device.copy_(self.host, non_blocking=True)
            mover(self.moves)
            logits = self.run()
            back.copy_(best(logits, top), non_blocking=True)
            return logits

        logits, replay = recorded(step, pool)
        self._graphs[top] = logits, back, replay

    def drawing(self, top: int, sequence: Sequence, pool: Any) -> Drawing | None:
        """What draws tokens behind this step as a sequence wants them; made when that was asked for often enough."""
        key = top, sequence.fingerprint
        self._asked[key] += 1
        if key not in self._drawings and self._asked[key] > WORTH_IT:
            from lookfar.gpu.drawing import Drawing

            if len(self._drawings) == DRAWINGS:  # forget the oldest, and that others were asked for
                del self._drawings[next(iter(self._drawings))]
                self._asked.clear()
            self.steps.first_of_its_kind = True
            try:
                self._drawings[key] = Drawing(self.logits, sequence.request.processors, pool)
            except Exception:
                self._drawings[key] = None  # it asks the host for something
        return self._drawings.get(key)

    def answers(self, plan: Plan, top: int, drawing: Drawing | None = None) -> Answers:
        """Wait for the device, and read what came back."""
        if self.on_gpu:
            torch.cuda.current_stream(self.device.device).synchronize()
        back, all_logits = self.back.numpy().copy(), self.logits  # the next step writes over what came back
        starts = list(accumulate(plan.lengths, initial=0))
        each = [slice(start, start + length) for start, length in zip(starts, plan.lengths, strict=False)]
        chosen, ids, values = back[:, 0].astype(np.int64), back[:, 1 : 1 + top], back[:, 1 + top :].view(np.float32)

        def logits(sequence: int, rows: Ints) -> torch.Tensor:
            start = starts[sequence]
            return all_logits[start + rows[0] : start + rows[-1] + 1]

        return Answers(
            np.arange(plan.width),
            [chosen[rows] for rows in each],
            logits,
            [ids[rows] for rows in each] if top else None,
            [values[rows] for rows in each] if top else None,
            [drawing.drawn.numpy()[rows].astype(np.int64) for rows in each] if drawing is not None else (),
        )


def recorded(run: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """Run something twice, for whatever is compiled or allocated once, and then for its graph: result and replay."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # others may use the device
            result = run()
    except Exception:
        # A capture that breaks off leaves the random generator waiting for its end; one that succeeds ends it.
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
        raise
    return result, graph.replay
