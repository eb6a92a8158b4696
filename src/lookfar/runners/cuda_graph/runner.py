"""The CUDA graph runner: which captured step a plan needs, capturing on first use, and the eager fallback."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch

from lookfar.core.plan import RequestPlan, RunnerLimits, StepPlan
from lookfar.core.progress import progress_bar
from lookfar.errors import CapacityError, ConfigError, LookfarWarning, ModelError, first_sentence
from lookfar.kernels.attention_op import NAME
from lookfar.kernels.row_table import MAX_PATH
from lookfar.kvcache.slots import SlotKVCache, exact_size
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import agree, branched_plan, one_slot
from lookfar.models.weight_changes import ModelChange, ModelFingerprint
from lookfar.runners.base import PendingStep
from lookfar.runners.cuda_graph.availability import why_no_graphs
from lookfar.runners.cuda_graph.compiled_layers import CompiledLayers, computes_weights, ignore_layer
from lookfar.runners.cuda_graph.fused_linear import FusedLinears
from lookfar.runners.cuda_graph.graph_sampler import GraphSampler
from lookfar.runners.cuda_graph.graph_step import GraphStep, LayerOptions, PendingGraphStep
from lookfar.runners.cuda_graph.memory import MemoryBudget, free_memory
from lookfar.runners.cuda_graph.self_check import CAPACITY, rows_are_independent, run_flat
from lookfar.runners.eager import EagerRunner

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows of captured steps; a step uses the next larger one
SIZE_OF = [next(size for size in SIZES if size >= rows) for rows in range(SIZES[-1] + 1)]
BATCHES = (1, 4, 16, 64, 512)  # requests that a captured step has room for; unused room costs little
FIXED_ROWS = 64
MOVED = "The model's weights were moved while this request was running: send it again."
SAMPLED_BYTES = 64 << 20  # larger scores are sampled by the host, row by row as needed


class CudaGraphRunner:
    """Runs flat steps as CUDA graphs, captured on first use; steps that do not fit run eagerly.

    `exact` gives every step that emits tokens the same number of rows. Without a GPU the same steps run uncaptured.
    """

    def __init__(self, model: BoundModel, exact: bool = False, compile: bool = False) -> None:
        self.model = model
        self.exact = exact
        self.eager = EagerRunner(model)
        self.name = " ".join(
            word for word, true in {"cuda graphs": True, "compiled": compile, "exact": exact}.items() if true
        )
        self.limits = self._own_limits = RunnerLimits(
            FIXED_ROWS if exact else SIZES[-1], MAX_PATH, padded=False, captured=True, fixed_rows=exact
        )
        self.compile = compile
        self.layers = self._layer_options()
        self.position_bytes = 0  # of one KV position in all layers
        self._captures = model.device.type == "cuda"
        self._works = True
        self._embedding = model.model.get_input_embeddings().weight
        self._address = self._embedding.data_ptr()
        self._fingerprint = ModelFingerprint.of(model.model)  # when the layers were fused
        self._generation = -1  # of the KV buffers that the captured steps use
        self._steps: dict[tuple[int, int], GraphStep] = {}
        self._pool: Any = None
        self._mover: Any = None

    def why_unavailable(self) -> str:
        """Run a small tree and return why this model cannot be run in flat steps; empty if it can."""
        if self.model.support.alibi:
            return "its attention adds a bias by position"
        plan, cache = branched_plan(self.model.vocab_size), one_slot(CAPACITY)
        with _on(self.model.device):
            expected = self.model.forward(plan, one_slot(CAPACITY))[0]
            try:
                same = agree(run_flat(self.model, plan, cache), expected)
            except Exception:
                same = False
            if not same:
                return "its attention does not go through transformers' attention interface"
            self.position_bytes = cache.nbytes // (CAPACITY + 1)
            if self._captures:
                self.layers.fused = FusedLinears(self.model.model, lambda: run_flat(self.model, plan, cache))
            if self.exact and not rows_are_independent(self.model, FIXED_ROWS):
                return "a row's result depends on the other rows"
        self._embedding = self.model.model.get_input_embeddings().weight
        self._address = self._embedding.data_ptr()
        self._fingerprint = ModelFingerprint.of(self.model.model)
        return ""

    def _layer_options(self) -> LayerOptions:
        model, compiled = self.model.model, None
        if self.compile and computes_weights(model):
            message = "its layers compute their weights (pruning, parametrisation), which torch.compile follows badly"
            warnings.warn(f"{self.model.support.model_type} runs uncompiled: {message}.", LookfarWarning, stacklevel=2)
        elif self.compile:
            compiled = CompiledLayers(model)
        return LayerOptions(FusedLinears(model, lambda: None), compiled)

    def create_cache(self) -> SlotKVCache:
        return SlotKVCache(sizing=self._size_cache if self._captures else exact_size)

    def refresh(self, everything: bool = False) -> ModelChange:
        change = self.model.refresh(everything)
        if self.model.fingerprint.structure != self._fingerprint.structure or everything:
            self._start_again()
        return change

    def _start_again(self) -> None:
        """Fuse the layers of a changed model again; its steps will be captured again."""
        self._drop_graphs()
        self.layers = self._layer_options()
        reason = (why_no_graphs(self.model) if self._captures else "") or self.why_unavailable()
        if not reason:
            self._works, self.limits = True, self._own_limits
        elif self.exact:
            raise ModelError(f"exact=True is unavailable for the model as it was changed: {reason}.")
        else:
            self._fingerprint = ModelFingerprint.of(self.model.model)
            self._run_eagerly(reason)

    def _size_cache(self, slots: int, length: int, most: int) -> tuple[int, int]:
        self._drop_graphs()  # they belong to the old buffers
        if not self._works:
            return exact_size(slots, length, most)
        budget = MemoryBudget(self.position_bytes, self._graph_memory(length), free_memory(self.model.device))
        return budget.cache_size(slots, length, most)

    def _graph_memory(self, length: int) -> int:
        """Estimate the buffers of the largest step: logits, twice, and attention sums over chunks of keys."""
        config = self.model.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", 1) * (getattr(config, "head_dim", None) or 128)
        return SIZES[-1] * (10 * self.model.vocab_size + 4 * heads * (2 + length // 1024))

    def _drop_graphs(self) -> None:
        self._steps.clear()
        self._mover = self._pool = None
        self._generation = -1
        if self.layers.compiled is not None:
            self.layers.compiled.select_layer = ignore_layer

    @property
    def graph_bytes(self) -> int:
        """The memory held by captured steps."""
        segments = torch.cuda.memory_snapshot() if self._pool is not None else []  # type: ignore[no-untyped-call]
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        started = perf_counter()
        k = min(plan.top_k, self.model.vocab_size)
        if self._works and self._embedding.data_ptr() != self._address:
            raise ModelError(MOVED)
        given = any(rows.embeds is not None for rows in plan.requests)
        fits = self._works and not given and sum(plan.lengths) <= self._max_rows(plan)
        step, captured = self._step_for(plan, cache, k) if fits else (None, False)
        if step is None or not step.fill(plan):
            if self.exact:
                raise ConfigError(
                    f"exact=True takes token ids, and {FIXED_ROWS} rows a step in trees of depth {MAX_PATH} at most: "
                    "lower the row budget."
                )
            return self.eager.launch(plan, cache)
        step.launch(k)
        launch_seconds = perf_counter() - started
        sampler, new_sampler = self._sampler_for(step, plan, k) if step.on_gpu else (None, False)
        if sampler is not None:
            sampler.launch(plan)
        return PendingGraphStep(step, plan, k, sampler, started, launch_seconds, not (captured or new_sampler))

    def _sampler_for(self, step: GraphStep, plan: StepPlan, k: int) -> tuple[GraphSampler | None, bool]:
        """Return the graph that samples the tokens of a step, if there is one, and whether it is new."""
        samplers = [rows.sampler for rows in plan.requests if rows.complete and rows.sampler is not None]
        if len({sampler.fingerprint for sampler in samplers}) != 1 or samplers[0].fingerprint is None:
            return None, False
        elsewhere = any(sampler.device != self.model.device for sampler in samplers)
        if elsewhere or 4 * step.rows * self.model.vocab_size > SAMPLED_BYTES:
            return None, False
        with _on(self.model.device):
            return step.sampler_for(k, samplers[0], self._pool)

    def _max_rows(self, plan: StepPlan) -> int:
        return FIXED_ROWS if self.exact and all(map(_is_complete, plan.requests)) else SIZES[-1]

    def _size(self, plan: StepPlan) -> int:
        most = self._max_rows(plan)
        return most if most == FIXED_ROWS else SIZE_OF[sum(plan.lengths)]

    def _step_for(self, plan: StepPlan, cache: SlotKVCache, k: int) -> tuple[GraphStep | None, bool]:
        """Return the step of the right shape and whether it was captured just now; None if capturing fails."""
        if cache.buffers.generation != self._generation:
            self._drop_graphs()
            self._generation = cache.buffers.generation
        rows = self._size(plan)
        batch = min(next(size for size in BATCHES if size >= plan.batch), cache.slots, rows)
        step = self._steps.get((rows, batch))
        if step is not None and step.is_captured(k):
            return step, False
        try:
            with _on(self.model.device):
                return self._capture(cache, rows, batch, k), True
        except Exception as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if not out_of_memory and self.layers.experts is None and self.model.has_experts:
                # The default way to multiply experts may ask the host how many rows each gets; this one never does.
                self.layers.experts = "batched_mm"
                self._drop_graphs()
                return self._step_for(plan, cache, k)
            self._give_up(error, rows)
            return None, True

    def _give_up(self, error: Exception, rows: int) -> None:
        """Run eagerly from now on, with a warning; an error where eager steps would not do."""
        if isinstance(error, torch.OutOfMemoryError):
            raise CapacityError(
                f"There is no memory to capture steps of {rows} rows: lower max_batch, max_length or prefill_chunk."
            ) from error
        if self.exact:
            raise ModelError(f"exact=True needs CUDA graphs, which failed: {first_sentence(error)[:200]}.") from error
        self._run_eagerly(first_sentence(error)[:200])

    def _run_eagerly(self, reason: str) -> None:
        self._works, self.limits = False, self.eager.limits
        name = self.model.support.model_type
        warnings.warn(f"{name} runs without CUDA graphs, which is slower: {reason}.", LookfarWarning, stacklevel=2)

    def _capture(self, cache: SlotKVCache, rows: int, batch: int, k: int) -> GraphStep:
        step = self._steps.get((rows, batch)) or GraphStep(self.model, cache, rows, batch, self.layers)
        if step.on_gpu:
            if self._mover is None:
                self._prepare(step, cache)
            waiting = progress_bar(f"Compiling steps of {rows} rows") if self.layers.compiled else nullcontext()
            with waiting:
                step.capture(k, self._mover.move, self._pool)
        self._steps[rows, batch] = step
        return step

    def _prepare(self, step: GraphStep, cache: SlotKVCache) -> None:
        """Allocate what all captured steps share: the KV buffers, a memory pool, and the mover."""
        from lookfar.kernels.kv_move import KVMover

        self._pool = torch.cuda.graph_pool_handle()
        with self.model.attending(NAME):
            step.clear()
            step.device.copy_(step.host)
            step.forward(self.model.model.forward)  # allocates the KV buffers
        self._mover = KVMover(cache.buffers.tensors())
        cache.copy_slot = self._mover.copy


def _is_complete(rows: RequestPlan) -> bool:
    return rows.complete


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Select the model's device, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
