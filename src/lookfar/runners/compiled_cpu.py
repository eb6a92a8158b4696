"""The compiled CPU runner: all layers of a Llama-like model in one compiled call, rows side by side."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.core.torch_threads import all_torch_threads, num_threads
from lookfar.kernels.cpu import layout
from lookfar.kernels.cpu.decoder import run_step
from lookfar.kernels.cpu.team import run_together
from lookfar.kernels.cpu.vectors import LANES, TILE_ROWS
from lookfar.kvcache.slot_buffers import SlotBuffers
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel, feeds_embeds
from lookfar.models.packed_decoder import PackedDecoder
from lookfar.models.self_check import agree, taken_slots
from lookfar.runners.base import PendingStep
from lookfar.runners.flat import (
    CAPACITY,
    FlatRunner,
    FlatStep,
    check_plan,
    flat_embeds,
    flat_logit_rows,
    flat_positions,
    flat_tokens,
)

OWN_THREADS = RunnerLimits(padded=False, own_threads=True, tiles=TILE_ROWS)


class CompiledRunner(FlatRunner):
    """Runs steps as compiled code where the model's layers are known, and otherwise as the flat runner does.

    The first compiled step is compared with the model's own code.
    """

    def __init__(self, model: BoundModel) -> None:
        super().__init__(model)
        self._steps: CompiledSteps | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return "flat" if self.model.decoder is None else "compiled"

    @property
    def limits(self) -> RunnerLimits:
        return super().limits if self.model.decoder is None else OWN_THREADS

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        packed = self.model.decoder
        if packed is None or plan.hidden:
            return self._launch_torch(plan, cache)
        is_warm = self._steps is not None and self._steps.packed is packed
        if self._steps is None or not is_warm:
            self._steps = CompiledSteps(self.model, packed)
            if not self._agrees(self._steps):
                self.model.refuse_compiled("its logits are not those of its own code")
                return self._launch_torch(plan, cache)
        return self._steps.launch(plan, cache, is_warm)

    def _launch_torch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        with all_torch_threads():
            return super().launch(plan, cache)

    def _agrees(self, steps: CompiledSteps) -> bool:
        """Whether a small compiled step gives the logits of the padded one."""
        plan = check_plan(self.model.vocab_size)
        expected = self.model.forward(plan, taken_slots(plan.batch, CAPACITY))
        try:
            found = steps.launch(plan, taken_slots(plan.batch, CAPACITY)).all_logits
        except Exception:  # code that cannot be compiled for this machine, say
            return False
        return agree(found, torch.cat([part[:count] for part, count in zip(expected, plan.lengths, strict=True)]))


class CompiledSteps:
    """Runs compiled steps with packed weights; holds the memory that they work in."""

    def __init__(self, model: BoundModel, packed: PackedDecoder) -> None:
        self.model, self.packed = model, packed
        self._room = 0, 0, 0  # rows, keys and threads that the buffers have room for
        self._buffers: dict[int, Floats] = {}
        self._with_kv: Ints | None = None  # the table of layers that has the addresses of KV buffers
        self._kv_generation = -1  # of those buffers

    def launch(self, plan: StepPlan, cache: SlotKVCache, is_warm: bool = True) -> CompiledStep:
        """Run a step."""
        started = perf_counter()
        if self.packed.missing:
            self.model.pack()
        cache.apply_moves()
        threads, logit_rows = num_threads(), flat_logit_rows(plan)
        self._make_room(sum(plan.lengths), int((plan.num_cached + plan.num_rows).max()), threads)
        found = Likeliest.room_for(len(logit_rows), plan.top_k, self.packed.vocab_size)
        step, arrays = self._sizes(plan, cache, found), {**self._rows(plan, cache), **self._buffers, **found.arrays}
        arrays[layout.CHOSEN] = logit_rows
        arrays[layout.LAYERS] = self._layers(cache.buffers)
        arrays[layout.COUNTERS] = np.zeros(layout.num_counters(self.packed.num_layers), np.int64)
        for column, array in arrays.items():
            step[column] = array.ctypes.data
        epsilon, scale = self.packed.constants

        def run(rank: int, used: Any = (step, arrays)) -> None:  # which a thread may still look at when others are done
            run_step(rank, threads, step.ctypes.data, epsilon, scale)

        run_together(run, threads)
        return CompiledStep(plan, found, perf_counter() - started, is_warm, self.packed.vocab_size)

    def _sizes(self, plan: StepPlan, cache: SlotKVCache, found: Likeliest) -> Ints:
        """Return the table of a step with its sizes and the addresses of weights."""
        packed, step = self.packed, np.zeros(layout.STEP_COLUMNS, np.int64)
        slot, head, _, _ = self._kv(cache.buffers, 0).keys.stride()
        step[: layout.COUNTERS] = (
            packed.hidden,
            packed.heads,
            packed.kv_heads,
            packed.head_dim,
            packed.inner,
            packed.vocab_size,
            sum(plan.lengths),
            plan.batch,
            len(found.ids),
            found.ids.shape[1],
            packed.num_layers,
            slot,
            head,
            self._buffers[layout.SCRATCH].shape[1],
        )
        step[layout.FINAL_NORM] = packed.final_norm_address
        step[layout.HEAD], step[layout.HEAD_FORMAT] = packed.head
        return step

    def _rows(self, plan: StepPlan, cache: SlotKVCache) -> dict[int, npt.NDArray[Any]]:
        """Return what a step says about its rows, and write their embeddings."""
        positions = np.concatenate([rows.positions for rows in plan.requests])
        kinds = self.model.support.kinds.values()
        table, first, sees = [], 0, 0
        for rows, count in zip(plan.requests, plan.lengths, strict=True):
            table.append((first, count, rows.num_cached, cache.slot_of(rows.kv), sees))
            first, sees = first + count, sees + count * count
        decoder: Any = self.model.model.model
        tokens, states = flat_tokens(plan), self._buffers[layout.STATES]
        with torch.no_grad():
            weight = decoder.embed_tokens.weight
            states[:first] = flat_embeds(self.model, tokens, plan) if feeds_embeds(plan) else weight.numpy()[tokens]
            cos, sin = decoder.rotary_emb(weight, flat_positions(self.model, plan)[None])
        states[first : layout.padded(first)] = 0.0
        return {
            layout.REQUEST_TABLE: np.array(table, np.int64),
            layout.VISIBLE: np.concatenate([rows.visible.reshape(-1) for rows in plan.requests]),
            layout.SEEN_FROM: np.array([[kind.first_visible(p) for p in positions.tolist()] for kind in kinds]),
            layout.POSITIONS: positions,
            layout.COS: np.ascontiguousarray(cos[0].numpy()),
            layout.SIN: np.ascontiguousarray(sin[0].numpy()),
        }

    def _layers(self, buffers: SlotBuffers) -> Ints:
        """Return the addresses of weights and KV buffers."""
        layers = self.packed.table()
        if self._with_kv is not layers or self._kv_generation != buffers.generation:
            for index, row in enumerate(layers):
                layer = self._kv(buffers, index)
                row[layout.KEYS], row[layout.VALUES] = layer.keys.data_ptr(), layer.values.data_ptr()
            self._with_kv, self._kv_generation = layers, buffers.generation
        return layers

    def _kv(self, buffers: SlotBuffers, index: int) -> Any:
        """Return the KV buffers of a layer, allocated."""
        layer = buffers.layer(index)
        if not layer.is_initialized:
            like = torch.zeros(1, self.packed.kv_heads, 1, self.packed.head_dim)
            layer.lazy_initialization(like, like)
        _, heads, _, dim = layer.keys.shape
        assert (heads, dim, layer.keys.dtype) == (self.packed.kv_heads, self.packed.head_dim, torch.float32)
        return layer

    def _make_room(self, rows: int, keys: int, threads: int) -> None:
        """Let the buffers have room for a step."""
        padded, packed = layout.padded(rows), self.packed
        if padded <= self._room[0] and keys <= self._room[1] and threads == self._room[2]:
            return
        self._room = padded, keys, threads = max(padded, self._room[0]), max(2 * keys, self._room[1]), threads
        attended = packed.heads * packed.head_dim
        width = attended + 2 * packed.kv_heads * packed.head_dim
        shapes = {
            layout.STATES: (padded, packed.hidden),
            layout.BLOCKS: (padded, packed.hidden),
            layout.QKV_ROWS: (padded, width),
            layout.INNER_BLOCKS: (padded, max(attended, packed.inner)),
            layout.SCRATCH: (threads, layout.scratch_size(packed.head_dim, keys) * LANES),
        }
        self._buffers = {column: np.zeros(shape, np.float32) for column, shape in shapes.items()}


class Likeliest:
    """The logits of some rows, padded, and their most likely tokens in order."""

    def __init__(self, logits: Floats, ids: Int32s, values: Floats) -> None:
        self.logits, self.ids, self.values = logits, ids, values

    @classmethod
    def room_for(cls, rows: int, top_k: int, vocab_size: int) -> Likeliest:
        k = max(min(top_k, vocab_size), 1)
        logits = np.empty((layout.padded(rows), -(-vocab_size // LANES) * LANES), np.float32)
        return cls(logits, np.empty((rows, k), np.int32), np.empty((rows, k), np.float32))

    @property
    def arrays(self) -> dict[int, npt.NDArray[Any]]:
        return {layout.LOGITS: self.logits, layout.TOP_IDS: self.ids, layout.TOP_LOGITS: self.values}


class CompiledStep(FlatStep):
    """The results of a compiled step."""

    def __init__(self, plan: StepPlan, found: Likeliest, seconds: float, is_warm: bool, vocab_size: int) -> None:
        super().__init__(plan, torch.from_numpy(found.logits)[: len(found.ids), :vocab_size], seconds, is_warm)
        self.found = found
        self.num_rows = layout.padded(self.num_rows)

    def most_likely(self) -> tuple[Ints, Int32s | None, Floats | None]:
        choices = self.found.ids[:, 0].astype(np.int64)
        return (choices, self.found.ids, self.found.values) if self.plan.top_k else (choices, None, None)
