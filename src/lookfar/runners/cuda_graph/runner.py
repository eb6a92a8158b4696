"""The CUDA graph runner: which captured step a plan needs, when it is captured, and the eager fallback."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.core.progress import progress_bar
from lookfar.errors import CapacityError, ConfigError, LookfarWarning, ModelError, first_sentence
from lookfar.kernels.attention_op import NAME
from lookfar.kernels.linear_op import HALF_TYPES
from lookfar.kernels.row_table import MAX_PATH
from lookfar.kvcache.slots import SlotKVCache, exact_size
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import agree, branched_plan, one_slot
from lookfar.models.weight_changes import ModelChange, ModelFingerprint
from lookfar.runners.base import PendingStep, StepShape
from lookfar.runners.cuda_graph.availability import why_no_graphs
from lookfar.runners.cuda_graph.captured_steps import CapturedSteps, StandIn
from lookfar.runners.cuda_graph.compiled_layers import CompiledLayers, computes_weights, ignore_layer
from lookfar.runners.cuda_graph.fused_linear import FusedLinears
from lookfar.runners.cuda_graph.graph_sampler import GraphSampler
from lookfar.runners.cuda_graph.graph_step import GraphStep, LayerOptions, PendingGraphStep
from lookfar.runners.cuda_graph.memory import MemoryBudget, free_memory, sampled_bytes
from lookfar.runners.cuda_graph.self_check import CAPACITY, rows_are_independent, run_flat
from lookfar.runners.eager import EagerRunner

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows of captured steps; a step uses the next larger one
SIZE_OF = [next(size for size in SIZES if size >= rows) for rows in range(SIZES[-1] + 1)]
BATCHES = (1, 4, 16, 64, 512)  # requests that a captured step has room for; unused room costs little
COMPILED_ROWS = 16  # rows of the step for which layers are compiled first; the code serves all steps of several rows
MOVED = "The model's weights were moved while this request was running: send it again."
CHECKED = (1, 16, 64, SIZES[-1])  # rows of the steps that are compared at load; every graph is, when it is captured
DEPENDENT = "the bits of a row depend on the other rows"


class CudaGraphRunner:
    """Runs flat steps as CUDA graphs, captured on first use; steps that do not fit run eagerly.

    `exact` makes the bits of a row independent of the other rows of a step and of their number; None: in half precision
    on a GPU, where the model allows it. Without a GPU the same steps run uncaptured.
    """

    def __init__(self, model: BoundModel, exact: bool | None = None, compile: bool = False) -> None:
        self.model = model
        self.asked_for = exact
        self.eager = EagerRunner(model)
        self.limits = self._own_limits = RunnerLimits(SIZES[-1], MAX_PATH, padded=False, captured=True)
        self.compile = compile
        self.layers = self._layer_options()
        self.position_bytes = 0  # of one KV position in all layers
        self._captures = model.device.type == "cuda"
        self.sampled_bytes = sampled_bytes(model.device)
        self._works = True
        self._embedding = model.model.get_input_embeddings().weight
        self._address = self._embedding.data_ptr()
        self._fingerprint = ModelFingerprint.of(model.model)  # when the layers were fused
        self._generation = -1  # of the KV buffers that the captured steps use
        self._steps = CapturedSteps()
        self._first: tuple[GraphStep, int] | None = None  # the first captured step, with its number of predictions
        self._pool: Any = None
        self._mover: Any = None

    def why_unavailable(self) -> str:
        """Run a small tree and return why this model cannot be run in flat steps; empty if it can."""
        if self.model.support.why_not_flat:
            return self.model.support.why_not_flat
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
                run = partial(run_flat, self.model, plan, cache)
                self.layers.fused = FusedLinears(self.model.model, run, self.exact)
            if self.exact and not rows_are_independent(self.model, replace(self.layers, compiled=None), CHECKED):
                if self.asked_for:
                    return DEPENDENT
                self._not_exact()
        self._embedding = self.model.model.get_input_embeddings().weight
        self._address = self._embedding.data_ptr()
        self._fingerprint = ModelFingerprint.of(self.model.model)
        return ""

    @property
    def exact(self) -> bool:
        """Whether the bits of a row depend on nothing but its text."""
        return self.layers.fused.exact

    @property
    def name(self) -> str:
        words = {"cuda graphs": True, "compiled": self.compile, "exact": self.exact}
        return " ".join(word for word, is_so in words.items() if is_so)

    def _not_exact(self) -> None:
        """Run as with `exact=False`, with a warning; an error if exactness was asked for."""
        if self.asked_for:
            raise ModelError(f"exact=True is unavailable for this model: {DEPENDENT}.")
        self.layers.fused.exact = False
        name, precision = self.model.support.model_type, str(self.model.model.dtype).removeprefix("torch.")
        message = f"{DEPENDENT}, so drafts and batches can change a text where two tokens are about equally likely"
        advice = "exact=False turns this warning off"
        warnings.warn(f"{name} is not exact in {precision}: {message} ({advice}).", LookfarWarning, stacklevel=2)

    def _layer_options(self) -> LayerOptions:
        exact = self.asked_for
        if exact is None:
            exact = self.model.device.type == "cuda" and self.model.model.dtype in HALF_TYPES
        model, compiled = self.model.model, None
        if self.compile and computes_weights(model):
            message = "its layers compute their weights (pruning, parametrisation), which torch.compile follows badly"
            warnings.warn(f"{self.model.support.model_type} runs uncompiled: {message}.", LookfarWarning, stacklevel=2)
        elif self.compile:
            compiled = CompiledLayers(model, exact=exact)
        return LayerOptions(FusedLinears(model, lambda: None, exact), compiled)

    def create_cache(self) -> SlotKVCache:
        return SlotKVCache(sizing=self._size_cache if self._captures else exact_size, leaves_gaps=True)

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
        elif self.asked_for:
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
        return SIZES[-1] * (10 * self.model.vocab_size + 4 * heads * (17 + length // 1024))

    def _drop_graphs(self) -> None:
        self._steps.clear()
        self._first = None
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
        fits = self._works and not plan.has_embeds and sum(plan.lengths) <= SIZES[-1]
        shape = _shape_of(SIZE_OF[sum(plan.lengths)], plan.batch, cache, k) if fits else None
        step, predictions, is_warm = self._step_for(shape, cache, plan.shared) if shape else (None, 0, False)
        if step is None or not step.fill(plan):
            if self.asked_for:
                raise ConfigError(
                    f"exact=True takes token ids, and {SIZES[-1]} rows a step in trees of depth {MAX_PATH} at most: "
                    "lower max_batch or the row budget."
                )
            return self.eager.launch(plan, cache)
        step.launch(predictions)
        launch_seconds = perf_counter() - started
        sampler = self._sampler_for(step, plan, predictions) if step.on_gpu else None
        if sampler is not None:
            with _on(self._embedding.device):
                is_warm = not sampler.launch(plan) and is_warm
        pending = PendingGraphStep(step, plan, k, sampler, started, launch_seconds, is_warm)
        return StandIn(pending, shape, self._steps.wanted) if shape in self._steps.wanted else pending

    def _sampler_for(self, step: GraphStep, plan: StepPlan, k: int) -> GraphSampler | None:
        """Return what samples the tokens of a step on the device; None if the host has to."""
        samplers = list(plan.samplers.values())
        if len({sampler.fingerprint for sampler in samplers}) != 1 or samplers[0].fingerprint is None:
            return None
        own = self._embedding.device  # `self.model.device` asks the model, which takes long
        elsewhere = any(sampler.device != own for sampler in samplers)
        if elsewhere or 4 * step.rows * self.model.vocab_size > self.sampled_bytes:
            return None
        return step.sampler_for(k, samplers[0], self._pool)

    def _step_for(self, shape: StepShape, cache: SlotKVCache, shared: bool) -> tuple[GraphStep | None, int, bool]:
        """Return the step to run, the predictions that it makes, and whether its times mean something.

        A missing step is captured, or a larger one stands in while the engine is `shared`. None if capturing fails.
        """
        self._follow(cache)
        found = self._steps.find(shape)
        if found is not None:
            return *found, True
        larger = self._steps.larger(shape)
        if larger is not None and shared and self._steps.should_wait(shape):
            return *larger, False
        try:
            return self._capture(cache, shape), shape.predictions, False
        except Exception as error:
            if larger is not None:
                self._steps.refuse(shape)
                return *larger, False
            if self._other_experts(error):
                return self._step_for(shape, cache, shared)
            self._give_up(error, shape.rows)
            return None, 0, False

    def _follow(self, cache: SlotKVCache) -> None:
        """Drop the steps that were captured for other KV buffers."""
        if cache.buffers.generation != self._generation:
            self._drop_graphs()
            self._generation = cache.buffers.generation

    def missing(self, cache: SlotKVCache, requests: int, predictions: Seq[int]) -> list[StepShape]:
        if not self._works:
            return []
        self._follow(cache)
        drafting = {min(k, self.model.vocab_size) for k in predictions if k} or {0}
        shapes: dict[StepShape, None] = {}  # ordered
        for rows in reversed(SIZES):
            for batch in range(1, min(requests, rows) + 1):
                wanted = drafting | ({0} if rows == SIZE_OF[batch] else set())  # without drafts, if one row each
                shapes |= dict.fromkeys(_shape_of(rows, batch, cache, k) for k in sorted(wanted, reverse=True))
        known = self._steps
        return [shape for shape in shapes if known.find(shape) is None and shape not in known.refused]

    def capture(self, cache: SlotKVCache, shape: StepShape) -> None:
        if not self._works or self._embedding.data_ptr() != self._address:
            return
        self._follow(cache)
        if self._steps.find(shape) is not None:
            return
        try:
            self._capture(cache, shape)
        except Exception as error:
            if self._steps.larger(shape) is not None or isinstance(error, torch.OutOfMemoryError):
                self._steps.refuse(shape)
            elif self._other_experts(error):
                self.capture(cache, shape)
            else:
                self._give_up(error, shape.rows)

    def next_wanted(self) -> StepShape | None:
        return self._steps.next_wanted()

    def _other_experts(self, error: Exception) -> bool:
        """Multiply experts in another way from now on, if an error may come from there; False if that is no help."""
        if isinstance(error, torch.OutOfMemoryError) or self.layers.experts is not None or not self.model.has_experts:
            return False
        # The default way to multiply experts may ask the host how many rows each gets; this one never does.
        self.layers.experts = "batched_mm"
        self._drop_graphs()
        return True

    def _check_bits(self, step: GraphStep, k: int) -> None:
        """Compare the bits of a new graph, in all rows, with those of the first one."""
        self._first = self._first or (step, k)
        expected, found = self._first[0].probe(self._first[1])[:1], step.probe(k)
        if not torch.equal(found, expected.expand_as(found)):
            self._not_exact()

    def _give_up(self, error: Exception, rows: int) -> None:
        """Run eagerly from now on, with a warning; an error where eager steps would not do."""
        if isinstance(error, torch.OutOfMemoryError):
            raise CapacityError(
                f"There is no memory to capture steps of {rows} rows: lower max_batch, max_length or prefill_chunk."
            ) from error
        if self.asked_for:
            raise ModelError(f"exact=True needs CUDA graphs, which failed: {first_sentence(error)[:200]}.") from error
        self._run_eagerly(first_sentence(error)[:200])

    def _run_eagerly(self, reason: str) -> None:
        self._works, self.limits = False, self.eager.limits
        name = self.model.support.model_type
        warnings.warn(f"{name} runs without CUDA graphs, which is slower: {reason}.", LookfarWarning, stacklevel=2)

    def _capture(self, cache: SlotKVCache, shape: StepShape) -> GraphStep:
        rows, batch, k = shape
        with _on(self.model.device):
            step = self._steps.steps.get((rows, batch)) or GraphStep(self.model, cache, rows, batch, self.layers)
            if step.on_gpu:
                waiting = progress_bar(f"Compiling steps of {rows} rows") if self.layers.compiled else nullcontext()
                with waiting:
                    if self._mover is None:
                        self._prepare(step, cache)
                    step.capture(k, self._mover.move, self._pool)
            step.captured.add(k)
            self._steps.steps[rows, batch] = step
            self._steps.wanted.pop(shape, None)
            if step.on_gpu and self.exact:
                self._check_bits(step, k)
        return step

    def _prepare(self, step: GraphStep, cache: SlotKVCache) -> None:
        """Allocate what all captured steps share: the KV buffers, a memory pool, and the mover."""
        from lookfar.kernels.kv_move import KVMover

        self._pool = torch.cuda.graph_pool_handle()
        with self.model.attending(NAME):
            step.clear()
            step.device.copy_(step.host)
            step.forward(self.model.model.forward)  # allocates the KV buffers
        if self.layers.compiled is not None:
            # Always first: compiled code is found on disk if the process has compiled the same things before it.
            first = GraphStep(self.model, cache, COMPILED_ROWS, 1, self.layers)
            first.clear()
            first.device.copy_(first.host)
            first.run()
        self._mover = KVMover(cache.buffers.tensors())
        cache.mover = self._mover


def _shape_of(rows: int, batch: int, cache: SlotKVCache, k: int) -> StepShape:
    """Return the shape of the captured step for so many rows, requests and predictions."""
    return StepShape(rows, min(next(size for size in BATCHES if size >= batch), cache.slots, rows), k)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Select the model's device, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
