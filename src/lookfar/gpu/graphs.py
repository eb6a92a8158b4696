"""Steps captured as CUDA graphs: the host writes one block of numbers, replays, and reads one block of answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence as Seq
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookfar.answers import Answers, EagerSteps, Room
from lookfar.arrays import Ints
from lookfar.cache import SlotCache
from lookfar.errors import CapacityError, LookfarWarning
from lookfar.gpu.interface import NAME
from lookfar.gpu.memory import cache_size, free_memory
from lookfar.gpu.packed import Forward, PackedStep
from lookfar.gpu.table import NEAR, is_told_by_paths
from lookfar.model import BoundModel
from lookfar.probe import agree, branched_plan
from lookfar.tree import Plan

if TYPE_CHECKING:
    from lookfar.sequence import Sequence

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows; a step has the next of these, the rest is padding
FIXED_ROWS = 64
CAPACITY = 64  # of the cache that a model is tried with


class CapturedSteps:
    """Runs packed steps, each shape captured when it is first needed; what does not fit, eagerly.

    `exact` gives every step that emits tokens the same number of rows. Without a GPU the same steps run uncaptured.
    """

    def __init__(self, model: BoundModel, exact: bool = False, compile: bool = False) -> None:
        self.model = model
        self.exact = exact
        self.eager = EagerSteps(model)
        self.name = " ".join(
            word for word, true in {"captured": True, "compiled": compile, "exact": exact}.items() if true
        )
        self.room = Room(FIXED_ROWS if exact else BUCKETS[-1], NEAR, packed=True, fixed=exact)
        self.launching = 0.0
        self.cell_bytes = 0
        self._forward: Forward = model.model.forward
        if compile:
            self._forward = torch.compile(model.model.forward, dynamic=True)
        self._captures = model.device.type == "cuda"
        self._works = True
        self._cache: SlotCache | None = None
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self._pool: Any = None
        self._mover: Any = None

    def why_not(self) -> str:
        """Try a small tree: why this model cannot be run packed, empty if it can."""
        if self.model.support.alibi:
            return "its attention adds a bias by place"
        try:
            same, self.cell_bytes = packs(self.model)
        except Exception:
            same = False
        return "" if same else "its attention does not go through transformers' attention interface"

    def fed(self, plan: Plan) -> int:
        return self._bucket(plan) if self._takes(plan) else self.eager.fed(plan)

    def cache_size(self, slots: int, cells: int, most_slots: int) -> tuple[int, int]:
        if not self._captures:
            return self.eager.cache_size(slots, cells, most_slots)
        self._drop()
        return cache_size(
            slots, cells, most_slots, self.cell_bytes, self._graph_bytes(cells), free_memory(self.model.device)
        )

    def _graph_bytes(self, cells: int) -> int:
        """What the buffers of the largest step are estimated to take: logits, twice, and sums over chunks of keys."""
        config = self.model.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", 1) * (getattr(config, "head_dim", None) or 128)
        return BUCKETS[-1] * (10 * self.model.vocab_size + 4 * heads * (2 + cells // 1024))

    def _drop(self) -> None:
        """Forget all captured steps: they belong to a cache that goes."""
        self._steps.clear()
        self._mover = self._pool = self._cache = None

    def start(self, plan: Plan, cache: SlotCache, group: Seq[Sequence], top: int) -> Callable[[], Answers]:
        began = perf_counter()
        step = self._step_for(plan, cache) if self._takes(plan, group) else None
        if step is None:
            self.launching = 0.0
            return self.eager.start(plan, cache, group, top)
        step.fill(plan)
        step.launch(top)
        self.launching = perf_counter() - began
        return lambda: step.answers(plan, top)

    def _takes(self, plan: Plan, group: Seq[Sequence] = ()) -> bool:
        """Can this step be packed?"""
        return (
            self._works
            and sum(map(len, plan.sequences)) <= BUCKETS[-1]
            and all(sequence.request.embeds is None for sequence in group)
            and all(map(is_told_by_paths, plan.sequences))
        )

    def _bucket(self, plan: Plan) -> int:
        rows = sum(map(len, plan.sequences))
        if self.exact and all(of_one.complete for of_one in plan.sequences):
            return FIXED_ROWS
        return next(size for size in BUCKETS if size >= rows)

    def _step_for(self, plan: Plan, cache: SlotCache) -> CapturedStep | None:
        """The step of the right shape, captured if it is new; None if the model cannot be captured."""
        if cache is not self._cache:
            self._drop()
            self._cache = cache
        rows = self._bucket(plan)
        batch = next(size for size in BUCKETS if size >= plan.batch)
        key = rows, min(batch, rows)
        if key not in self._steps:
            try:
                self._steps[key] = self._capture(*key)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"There is no memory to capture steps of {rows} rows: lower max_batch, max_length or prefill_rows."
                ) from error
            except Exception as error:
                self._works = False
                self.room = Room()
                name = self.model.support.model_type
                reason = " ".join(str(error).split())[:200]
                warnings.warn(
                    f"{name} runs without captured steps, which is slower: {reason}", LookfarWarning, stacklevel=2
                )
                return None
        return self._steps[key]

    def _capture(self, rows: int, batch: int) -> CapturedStep:
        assert self._cache is not None
        step = CapturedStep(self.model, self._cache, rows, batch)
        with self.model.attending(NAME):
            if not self._captures:
                step.run_with(self._forward)
                return step
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            step.warm_up(self._forward)
            if self._mover is None:
                from lookfar.gpu.moving import Mover

                self._mover = Mover(self._cache)
            step.capture(self._forward, self._mover, self._pool)
        return step


def packs(model: BoundModel) -> tuple[bool, int]:
    """Does a packed step give the model's own answers? And what one cell of the cache takes."""
    plan, cache = branched_plan(model.vocab_size), SlotCache(slots=1, capacity=CAPACITY)
    expected = model.forward(plan, cache)[0]
    step = PackedStep(model, SlotCache(slots=1, capacity=CAPACITY), 16, 1)
    step.fill(plan)
    step.device.copy_(step.host)
    with model.attending(NAME):
        found = step.forward(model.model.forward)[: len(expected)]
    return agree(found, expected), cache.nbytes // (CAPACITY + 1)


class CapturedStep(PackedStep):
    """A packed step as a graph, and graphs that choose from its logits."""

    def __init__(self, model: BoundModel, cache: SlotCache, rows: int, batch: int) -> None:
        super().__init__(model, cache, rows, batch)
        self.logits = torch.empty(0)
        self._replay: Callable[[], None] = lambda: None
        self._choosers: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._pool: Any = None

    def fill(self, plan: Plan) -> None:
        super().fill(plan)
        self.host_moves[:, 0] = -1
        if self.device.device.type == "cpu":
            return  # moved by the cache itself
        for i in range(plan.batch):
            cells = self.cache.claim(plan.first_slot + i, NEAR)
            if cells is not None:
                orders = self.host_moves[i]
                orders[:] = -1
                orders[0] = plan.first_slot + i
                orders[1 : 1 + len(cells[0])], orders[1 + NEAR : 1 + NEAR + len(cells[1])] = cells

    def run_with(self, forward: Forward) -> None:
        """Without a GPU: run the model each time."""

        def replay() -> None:
            self.cache.settle()
            with self.model.attending(NAME):
                self.logits = self.forward(forward)

        self._replay = replay

    def warm_up(self, forward: Forward) -> None:
        """Run it twice with padding alone: whatever is compiled or allocated once is, before the capture."""
        self.clear()
        self.device.copy_(self.host)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.forward(forward)
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, forward: Forward, mover: Callable[[torch.Tensor], None], pool: Any) -> None:
        self.host_moves[:] = -1
        self.device.copy_(self.host)
        mover(self.moves)  # compiles
        torch.cuda.synchronize()
        self._pool, graph = pool, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.device.copy_(self.host, non_blocking=True)
            mover(self.moves)
            self.logits = self.forward(forward)
        self._replay = graph.replay

    def launch(self, top: int) -> None:
        self._replay()
        if top not in self._choosers:
            self._choosers[top] = self._chooser(top)
        self._choosers[top][1]()

    def _chooser(self, top: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Choices and `top` predictions of every row, and how they get into the block that comes back."""
        on_gpu = self.logits.device.type == "cuda"
        back = torch.zeros(self.rows, 1 + 2 * top, dtype=torch.int32, pin_memory=on_gpu)

        def choose() -> None:
            scores = self.logits.float()  # as transformers compares them
            columns = [scores.argmax(-1, keepdim=True).int()]
            if top:
                values, ids = scores.topk(top, -1)
                columns += [ids.int(), values.view(torch.int32)]
            back.copy_(torch.cat(columns, -1), non_blocking=True)

        if not on_gpu:
            return back, choose
        choose()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            choose()
        return back, graph.replay

    def answers(self, plan: Plan, top: int) -> Answers:
        """Wait for the device, and read what came back."""
        if self.logits.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        back = self._choosers[top][0].numpy()
        starts = np.cumsum([0, *map(len, plan.sequences)])
        of_each = [back[start:end] for start, end in zip(starts[:-1], starts[1:], strict=True)]

        def logits(sequence: int, rows: Ints) -> torch.Tensor:
            return self.logits[starts[sequence] + rows[0] : starts[sequence] + rows[-1] + 1]

        return Answers(
            np.arange(plan.width),
            [own[:, 0].astype(np.int64) for own in of_each],
            logits,
            [own[:, 1 : 1 + top] for own in of_each] if top else None,
            [own[:, 1 + top :].view(np.float32) for own in of_each] if top else None,
        )
