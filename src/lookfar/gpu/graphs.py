"""Captured steps of all shapes: which one a plan needs, captured on first use, and what happens if it cannot be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lookfar.answers import Answers, EagerSteps, Room
from lookfar.cache import SlotCache
from lookfar.errors import CapacityError, ConfigError, LookfarWarning, ModelError, first_sentence
from lookfar.gpu.captured import CapturedStep
from lookfar.gpu.compiled import CompiledLayers, no_turn
from lookfar.gpu.interface import NAME
from lookfar.gpu.memory import cache_size, free_memory
from lookfar.gpu.sisters import Sisters
from lookfar.gpu.table import NEAR
from lookfar.gpu.trial import CAPACITY, keeps_rows_apart, try_out
from lookfar.model import BoundModel
from lookfar.probe import agree, branched_plan
from lookfar.progress import bar
from lookfar.tree import Plan

if TYPE_CHECKING:
    from lookfar.gpu.drawing import Drawing
    from lookfar.sequence import Sequence

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows; a step has the next of these, the rest is padding
BUCKET_OF = [next(size for size in BUCKETS if size >= rows) for rows in range(BUCKETS[-1] + 1)]
BATCHES = (1, 4, 16, 64, 512)  # sequences that there is room for; what is left empty costs little
FIXED_ROWS = 64
DRAWN_BYTES = 64 << 20  # of scores: what has more is drawn by the host, row by row as needed


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
            if self.exact and not keeps_rows_apart(self.model, FIXED_ROWS):
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
        if self.compiled is not None:
            self.compiled.turn = no_turn

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
        drawing = self._drawing(step, plan, group, top) if step.on_gpu else None
        if drawing is not None:
            drawing.launch(plan, group)
        return lambda: step.answers(plan, top, drawing)

    def _drawing(self, step: CapturedStep, plan: Plan, group: Seq[Sequence], top: int) -> Drawing | None:
        """What draws the sampled tokens of a step; None if there are none, or if they cannot be drawn all at once."""
        sampled = [
            (sequence, sequence.request.draws.noise)
            for sequence, rows in zip(group, plan.sequences, strict=False)
            if rows.complete and sequence.request.draws is not None
        ]
        if len({sequence.fingerprint for sequence, _ in sampled}) != 1 or sampled[0][0].fingerprint is None:
            return None
        elsewhere = any(noise.device != self.model.device for _, noise in sampled)
        if elsewhere or 4 * step.rows * self.model.vocab_size > DRAWN_BYTES:
            return None
        with _on(self.model.device):
            return step.drawing(top, sampled[0][0], self._pool)

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
        batch = min(next(size for size in BATCHES if size >= plan.batch), cache.slots, rows)
        step = self._steps.get((rows, batch))
        if step is not None and step.ready(top):
            return step
        self.first_of_its_kind = True
        try:
            with _on(self.model.device):
                return self._capture(cache, rows, batch, top)
        except Exception as error:
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
                raise ModelError(
                    f"exact=True needs captured steps, which failed: {first_sentence(error)[:200]}."
                ) from error
            self._works, self.room = False, self.eager.room
            name = self.model.support.model_type
            message = f"{name} runs without captured steps, which is slower: {first_sentence(error)[:200]}."
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
                cache.copy_cells = self._mover.copy
            waiting = bar(f"Compiling steps of {rows} rows") if self.compiled else nullcontext()
            with waiting:
                step.capture(top, self._mover, self._pool)
        self._steps[rows, batch] = step
        return step


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels go to the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
