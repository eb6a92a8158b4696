"""The cost curve of a model on this machine: measured on first use, kept in the user's cache directory."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from lookfar.core.cache_dir import cache_dir
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.progress import progress_bar
from lookfar.core.tree import DraftTree
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.self_check import one_slot
from lookfar.retrieval.recycle_table import TOP_K
from lookfar.runners.base import ModelRunner
from lookfar.speculation.cost_curve import MEASURED_ROWS, CostCurve, measure_curve
from lookfar.speculation.cost_file import Experience, KnownCosts, read_costs, write_costs

REFINED_ENOUGH = 1000  # steps after which a refined curve is kept
CONTEXT = 256  # tokens before the measured steps; real steps correct for longer ones
MEASURED_LENGTH = CONTEXT + 256


def known_costs(runner: ModelRunner, cache: SlotKVCache, most: int) -> KnownCosts:
    """Return the cost curve of a runner: from the file, or measured.

    Captured steps belong to a KV cache, so they are measured on the engine's own, unless requests are using it.
    """
    known = kept_costs(runner)
    if known is not None:
        return known
    with progress_bar("Measuring the cost of a step (once for this model and machine)"):
        if not runner.limits.captured or cache.order:
            curve = measure_steps(runner, one_slot(MEASURED_LENGTH), 0)
        else:
            cache.reserve(1, MEASURED_LENGTH, most=most, keep=False)
            handle, _ = cache.allocate()
            try:
                curve = measure_steps(runner, cache, handle)
            finally:
                cache.free(handle)
    write_costs(costs_file(), machine_and_model(runner), curve, {})
    return KnownCosts(curve)


def kept_costs(runner: ModelRunner) -> KnownCosts | None:
    """Return the cost curve of a runner that the file holds, if any."""
    return read_costs(costs_file(), machine_and_model(runner), runner.limits.captured)


def save_refined_costs(runner: ModelRunner, curve: CostCurve, experience: Mapping[str, Experience]) -> None:
    """Write the curve to the file once `REFINED_ENOUGH` real steps have refined it."""
    if curve.refined >= REFINED_ENOUGH:
        write_costs(costs_file(), machine_and_model(runner), curve, experience)
        curve.refined = 0


def measure_steps(runner: ModelRunner, cache: SlotKVCache, handle: int, sizes: Seq[int] = MEASURED_ROWS) -> CostCurve:
    """Time steps of several numbers of rows, in the shape of a tree."""
    model = runner.model
    context = min(CONTEXT, (model.support.max_positions or CONTEXT) // 2)

    def step(rows: int) -> None:
        runner.launch(tree_plan(rows, context, model.vocab_size, handle), cache).result()

    most = runner.limits.rows or max(sizes)
    sizes = [rows for rows in sizes if rows <= most]
    return measure_curve(step, sizes, stepped=runner.limits.captured)


def tree_plan(rows: int, context: int, vocab_size: int, handle: int = 0) -> StepPlan:
    """Return a step of so many rows after a context, in which every node has two children."""
    places = np.arange(rows - 1, dtype=np.int32)
    depths = np.log2(places + 2).astype(np.int32)
    scores = places.astype(np.float32)
    tree = DraftTree(np.stack([places % vocab_size, (places - 2) // 2, depths, places, places]), scores)
    return StepPlan([RequestPlan(np.zeros(1, np.int64), context, handle, tree=tree)], TOP_K)


def machine_and_model(runner: ModelRunner) -> str:
    """Return a key of everything that the cost of a step depends on, as far as it can be named."""
    model = runner.model
    config = model.model.config.get_text_config(decoder=True)
    device = model.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    facts = [
        config.model_type,
        sum(p.numel() for p in model.model.parameters()),
        getattr(config, "num_hidden_layers", ""),
        model.vocab_size,
        model.model.dtype,
        model.packed,
        runner.name,
        device.type,
        place,
        torch.get_num_threads(),
        torch.__version__,
    ]
    return " ".join(map(str, facts))


def costs_file() -> Path:
    return cache_dir() / "costs.json"
