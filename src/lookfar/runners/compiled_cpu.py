"""The compiled CPU runner: all layers of a Llama-like model in one compiled call, rows side by side."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.kernels.cpu import decoder
from lookfar.kernels.cpu.team import run_together
from lookfar.kernels.cpu.vectors import LANES
from lookfar.kvcache.slot_buffers import SlotBuffers
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.models.packed_decoder import PackedDecoder
from lookfar.models.self_check import agree, taken_slots
from lookfar.runners.base import PendingStep
from lookfar.runners.flat import (
    CAPACITY,
    FLAT,
    FlatRunner,
    FlatStep,
    check_plan,
    flat_embeds,
    flat_logit_rows,
    flat_positions,
    flat_tokens,
)


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
        return super().limits if self.model.decoder is None else FLAT

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> PendingStep:
        packed = self.model.decoder
        if packed is None or plan.hidden:
            return super().launch(plan, cache)
        first = self._steps is None or self._steps.packed is not packed
        if self._steps is None or self._steps.packed is not packed:
            self._steps = CompiledSteps(self.model, packed)
            if not self._agrees(self._steps):
                self.model.refuse_compiled("its logits are not those of its own code")
                return super().launch(plan, cache)
        return self._steps.launch(plan, cache, is_warm=not first)

    def _agrees(self, steps: CompiledSteps) -> bool:
        """Whether a small compiled step gives the logits of the padded one."""
        plan = check_plan(self.model.vocab_size)
        expected = self.model.forward(plan, taken_slots(plan.batch, CAPACITY))
        found = steps.launch(plan, taken_slots(plan.batch, CAPACITY)).all_logits
        return agree(found, torch.cat([part[:count] for part, count in zip(expected, plan.lengths, strict=True)]))


class CompiledSteps:
    """Runs compiled steps with packed weights; holds the memory that they work in."""

    def __init__(self, model: BoundModel, packed: PackedDecoder) -> None:
        self.model, self.packed = model, packed
        self._buffers: tuple[Floats, ...] = ()
        self._room = 0, 0, 0  # rows, keys and threads that the buffers have room for

    def launch(self, plan: StepPlan, cache: SlotKVCache, is_warm: bool = True) -> CompiledStep:
        """Run a step."""
        started = perf_counter()
        if self.packed.missing:
            self.model.pack()
        cache.apply_moves()
        rows, threads = sum(plan.lengths), torch.get_num_threads()
        h, *others = self._room_for(rows, int((plan.num_cached + plan.num_rows).max()), threads)
        decoder_model: Any = self.model.model.model
        with torch.no_grad():
            embeds = flat_embeds(self.model, flat_tokens(plan), plan)
            cos, sin = decoder_model.rotary_emb(embeds, flat_positions(self.model, plan)[None])
        h[:rows] = embeds.numpy()
        h[rows:] = 0.0
        logit_rows = flat_logit_rows(plan)
        logits, *found = self._results(len(logit_rows), plan.top_k)
        layers, sizes = self._tables(cache.buffers, rows)
        counter = np.zeros(1, np.int64)
        arguments = (
            counter.ctypes.data,
            sizes,
            self.packed.constants,
            layers,
            _requests(plan, cache),
            self._masks(plan),
            (cos[0].numpy(), sin[0].numpy()),
            (h, *others),
            (logit_rows, decoder_model.norm.weight.detach().numpy(), self.packed.head_address),
            (logits, *found),
        )
        run_together(lambda rank, size: decoder.run_step((rank, size), *arguments), threads)
        all_logits = torch.from_numpy(logits)[: len(logit_rows), : self.packed.vocab_size]
        return CompiledStep(plan, all_logits, perf_counter() - started, is_warm, tuple(found))

    def _tables(self, buffers: SlotBuffers, rows: int) -> tuple[Ints, Ints]:
        """Return the addresses of weights and KV buffers, and the sizes of the step."""
        packed = self.packed
        layers = packed.table()
        for index, row in enumerate(layers):
            layer = buffers.layer(index)
            if not layer.is_initialized:
                like = torch.zeros(1, packed.kv_heads, 1, packed.head_dim)
                layer.lazy_initialization(like, like)
            row[decoder.KEYS], row[decoder.VALUES] = layer.keys.data_ptr(), layer.values.data_ptr()
        slot, head, _, _ = buffers.layer(0).keys.stride()
        shape = packed.hidden, packed.heads, packed.kv_heads, packed.head_dim, packed.inner, packed.vocab_size
        return layers, np.array([*shape, rows, slot, head])

    def _results(self, rows: int, top_k: int) -> tuple[Floats, Ints, Int32s, Floats]:
        """Return room for the logits of some rows, padded, and for their most likely tokens."""
        vocab_size, k = self.packed.vocab_size, max(min(top_k, self.packed.vocab_size), 1)
        logits = np.empty((_padded(rows), -(-vocab_size // LANES) * LANES), np.float32)
        return logits, np.empty(rows, np.int64), np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)

    def _room_for(self, rows: int, keys: int, threads: int) -> tuple[Floats, ...]:
        """Return the buffers: hidden states, blocks of rows, queries with keys and values, inner blocks, scratch."""
        padded, packed = _padded(rows), self.packed
        if padded > self._room[0] or keys > self._room[1] or threads != self._room[2]:
            padded, keys = max(padded, self._room[0]), max(2 * keys, self._room[1])
            dim, attended = packed.head_dim, packed.heads * packed.head_dim
            scratch = (2 * dim + 1 + keys + 2 * decoder.BLOCK) * LANES
            self._buffers = (
                np.zeros((padded, packed.hidden), np.float32),
                np.zeros(padded * packed.hidden, np.float32),
                np.zeros((padded, attended + 2 * packed.kv_heads * dim), np.float32),
                np.zeros(padded * max(attended, packed.inner), np.float32),
                np.zeros((threads, scratch), np.float32),
            )
            self._room = padded, keys, threads
        return self._buffers

    def _masks(self, plan: StepPlan) -> tuple[Any, Ints, Ints]:
        positions = np.concatenate([rows.positions for rows in plan.requests])
        kinds = self.model.support.kinds.values()
        seen_from = np.array([[kind.first_visible(p) for p in positions.tolist()] for kind in kinds])
        return np.concatenate([rows.visible.reshape(-1) for rows in plan.requests]), seen_from, positions


def _requests(plan: StepPlan, cache: SlotKVCache) -> Ints:
    table, first, visible = [], 0, 0
    for rows, count in zip(plan.requests, plan.lengths, strict=True):
        table.append((first, count, rows.num_cached, cache.slot_of(rows.kv), visible))
        first, visible = first + count, visible + count * count
    return np.array(table)


def _padded(rows: int) -> int:
    full = rows // decoder.BLOCK * decoder.BLOCK
    return full + (int(decoder.SIZES[rows - full - 1]) if rows > full else 0)


class CompiledStep(FlatStep):
    """The results of a compiled step."""

    def __init__(
        self, plan: StepPlan, logits: torch.Tensor, seconds: float, is_warm: bool, found: tuple[Ints, Int32s, Floats]
    ) -> None:
        super().__init__(plan, logits, seconds, is_warm)
        self.found = found

    def most_likely(self) -> tuple[Ints, Int32s | None, Floats | None]:
        choices, ids, values = self.found
        return (choices, ids, values) if self.plan.top_k else (choices, None, None)
