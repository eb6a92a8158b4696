"""Steps captured as CUDA graphs: the host writes one block of numbers, replays, and reads one block of answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookfar.answers import Answers, EagerSteps, Room
from lookfar.arrays import Ints
from lookfar.cache import SlotCache
from lookfar.errors import CapacityError, ConfigError, LookfarWarning, ModelError
from lookfar.gpu import twin
from lookfar.gpu.compiled import CompiledLayers
from lookfar.gpu.interface import NAME
from lookfar.gpu.memory import cache_size, free_memory
from lookfar.gpu.packed import PackedStep
from lookfar.gpu.sisters import Sisters
from lookfar.gpu.table import NEAR
from lookfar.model import BoundModel
from lookfar.probe import agree, branched_plan
from lookfar.progress import bar
from lookfar.tree import Plan, SequencePlan, TokenTree

if TYPE_CHECKING:
    from lookfar.sequence import Sequence

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows; a step has the next of these, the rest is padding
BUCKET_OF = [next(size for size in BUCKETS if size >= rows) for rows in range(BUCKETS[-1] + 1)]
EVERY_ROW = np.arange(BUCKETS[-1])
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
        self.first_of_its_kind = False
        self.experts: str | None = None  # how experts are multiplied, if not as the model does
        self.cell_bytes = 0
        self.sisters = Sisters(model.model, lambda: None)
        self.compiled = CompiledLayers(model.model) if compile else None
        self._captures = model.device.type == "cuda"
        self._works = True
        self._embedding = model.model.get_input_embeddings().weight
        self._address = self._embedding.data_ptr()
        self._cache: SlotCache | None = None
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self._pool: Any = None
        self._mover: Any = None

    def why_not(self) -> str:
        """Try a small tree: why this model cannot be run packed, empty if it can."""
        if self.model.support.alibi:
            return "its attention adds a bias by place"
        plan, cache = branched_plan(self.model.vocab_size), SlotCache(1, CAPACITY)
        with _on(self.model.device):
            expected = self.model.forward(plan, SlotCache(1, CAPACITY))[0]
            try:
                same = agree(try_out(self.model, plan, cache), expected)
            except Exception:
                same = False
            if not same:
                return "its attention does not go through transformers' attention interface"
            self.cell_bytes = cache.nbytes // (CAPACITY + 1)
            if self._captures:
                self.sisters = Sisters(self.model.model, lambda: try_out(self.model, plan, cache))
            if self.exact and not keeps_rows_apart(self.model):
                return "a row's answer depends on the rows beside it"
        return ""

    def fed(self, plan: Plan) -> int:
        return self._bucket(plan) if self._works and sum(plan.lengths) <= self._most(plan) else self.eager.fed(plan)

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

    @property
    def graph_bytes(self) -> int:
        """Memory held by captured steps."""
        segments = torch.cuda.memory_snapshot() if self._pool is not None else []  # type: ignore[no-untyped-call]
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    def start(self, plan: Plan, cache: SlotCache, group: Seq[Sequence], top: int) -> Callable[[], Answers]:
        began = perf_counter()
        self.first_of_its_kind = False
        top = min(top, self.model.vocab_size)
        if self._embedding.data_ptr() != self._address:
            raise ModelError("The model's weights were moved after its steps were captured: make a new LM of it.")
        given = any(sequence.request.embeds is not None for sequence in group)
        fits = self._works and not given and sum(plan.lengths) <= self._most(plan)
        step = self._step_for(plan, cache, top) if fits else None
        if step is None or not step.fill(plan):
            if self.exact:
                raise ConfigError(
                    f"exact=True takes token ids, and feeds {FIXED_ROWS} rows a step in trees of depth {NEAR} at most: "
                    "guess less at once."
                )
            self.launching = 0.0
            return self.eager.start(plan, cache, group, top)
        step.launch(top)
        self.launching = perf_counter() - began
        return lambda: step.answers(plan, top)

    def _most(self, plan: Plan) -> int:
        """The most rows that such a step can have."""
        return FIXED_ROWS if self.exact and all(rows.complete for rows in plan.sequences) else BUCKETS[-1]

    def _bucket(self, plan: Plan) -> int:
        most = self._most(plan)
        return most if most == FIXED_ROWS else BUCKET_OF[sum(plan.lengths)]

    def _step_for(self, plan: Plan, cache: SlotCache, top: int) -> CapturedStep | None:
        """The step of the right shape, captured if it is new; None if the model cannot be captured."""
        if cache is not self._cache:
            self._drop()
            self._cache = cache
        rows = self._bucket(plan)
        batch = BUCKET_OF[plan.batch]
        step = self._steps.get((rows, min(batch, rows)))
        if step is not None and step.ready(top):
            return step
        self.first_of_its_kind = True
        try:
            with _on(self.model.device):
                return self._capture(cache, rows, min(batch, rows), top)
        except Exception as error:
            _end_captures(self.model.device)
            if isinstance(error, torch.OutOfMemoryError) and self.experts is None:
                raise CapacityError(
                    f"There is no memory to capture steps of {rows} rows: lower max_batch, max_length or prefill_rows."
                ) from error
            if self.experts is None and self.model.has_experts:
                # How experts are multiplied by default may ask the host for their numbers of rows; this way never does.
                self.experts = "batched_mm"
                self._drop()
                return self._step_for(plan, cache, top)
            if self.exact:
                raise ModelError(f"exact=True needs captured steps, which failed: {_gist(error)}.") from error
            self._works, self.room = False, self.eager.room
            name = self.model.support.model_type
            message = f"{name} runs without captured steps, which is slower: {_gist(error)}."
            warnings.warn(message, LookfarWarning, stacklevel=2)
            return None

    def _capture(self, cache: SlotCache, rows: int, batch: int, top: int) -> CapturedStep:
        step = self._steps.get((rows, batch)) or CapturedStep(self.model, cache, rows, batch, self)
        if step.on_gpu:
            if self._mover is None:
                from lookfar.gpu.moving import Mover

                self._pool = torch.cuda.graph_pool_handle()
                with self.model.attending(NAME):
                    step.clear()
                    step.device.copy_(step.host)
                    step.forward(self.model.model.forward)  # makes the cache's buffers
                self._mover = Mover(cache)
            waiting = bar(f"Compiling steps of {rows} rows") if self.compiled else nullcontext()
            with waiting:
                step.capture(top, self._mover, self._pool)
        self._steps[rows, batch] = step
        return step


def keeps_rows_apart(model: BoundModel) -> bool:
    """Is a root's answer the same to the last bit, whatever is guessed after it?"""
    root, cache = np.array([1 % model.vocab_size]), SlotCache(1, CAPACITY + FIXED_ROWS)
    found = []
    for seed in range(3):
        guesses = np.random.default_rng(seed).integers(0, model.vocab_size, (3 * seed, 4)).tolist()
        plan = Plan([SequencePlan(root, cached=0, tree=TokenTree.of(guesses))])
        found.append(try_out(model, plan, cache, FIXED_ROWS)[0])
    return all(torch.equal(found[0], other) for other in found)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels go to the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _end_captures(device: torch.device) -> None:
    """A capture that was broken off leaves the random generator waiting for its end; one that succeeds ends it."""
    if device.type == "cuda":
        with _on(device), suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)


def _gist(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:200]


def try_out(model: BoundModel, plan: Plan, cache: SlotCache, rows: int = 16) -> torch.Tensor:
    """The logits of a packed step."""
    step = PackedStep(model, cache, rows, 1)
    step.fill(plan)
    step.device.copy_(step.host)
    with model.attending(NAME):
        return step.forward(model.model.forward)[: plan.width]


class CapturedStep(PackedStep):
    """A packed step as graphs: one for each number of predictions that is asked for."""

    def __init__(self, model: BoundModel, cache: SlotCache, rows: int, batch: int, steps: CapturedSteps) -> None:
        super().__init__(model, cache, rows, batch)
        self.steps = steps
        self.logits = torch.empty(0)
        self.back = torch.empty(0)
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor, Callable[[], None]]] = {}

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
        """Run it twice with padding alone, for whatever is compiled or allocated once, and then for the graph."""
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

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
            step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # others may use the device
            logits = step()
        self._graphs[top] = logits, back, graph.replay

    def answers(self, plan: Plan, top: int) -> Answers:
        """Wait for the device, and read what came back."""
        if self.on_gpu:
            torch.cuda.current_stream(self.device.device).synchronize()
        back, all_logits = self.back.numpy(), self.logits
        starts = list(accumulate(plan.lengths, initial=0))
        of_each = [back[start : start + length] for start, length in zip(starts, plan.lengths, strict=False)]

        def logits(sequence: int, rows: Ints) -> torch.Tensor:
            start = starts[sequence]
            return all_logits[start + rows[0] : start + rows[-1] + 1]

        return Answers(
            EVERY_ROW[: plan.width],
            [own[:, 0].astype(np.int64) for own in of_each],
            logits,
            [own[:, 1 : 1 + top] for own in of_each] if top else None,
            [own[:, 1 + top :].view(np.float32) for own in of_each] if top else None,
        )
