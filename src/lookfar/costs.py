"""The cost curve of a model on this machine: measured on first use, kept in the user's cache directory."""

from __future__ import annotations

import platform

import numpy as np
import torch

from lookfar.answers import Steps
from lookfar.budget import MEASURED, CostCurve, keep_curve, measure, read_curve
from lookfar.cache import SlotCache
from lookfar.demo import cache_dir
from lookfar.progress import bar
from lookfar.successors import TOP
from lookfar.tree import Plan, SequencePlan, TokenTree

REFINED_ENOUGH = 1000  # steps
CONTEXT = 256  # tokens before the measured steps; real steps correct for longer ones
MEASURED_CELLS = CONTEXT + 256


def step_costs(steps: Steps, cache: SlotCache | None = None) -> CostCurve:
    """The kept curve, or a new one."""
    path, key = cache_dir() / "costs.json", machine_and_model(steps)
    curve = read_curve(path, key, steps.room.packed)
    if curve is None:
        with bar("Measuring what a step costs (once for this model and machine)"):
            curve = measure_steps(steps, cache)
        keep_curve(path, key, curve)
    return curve


def keep_refined(steps: Steps, curve: CostCurve) -> None:
    """Keep what real steps have taught, once there were many of them."""
    if curve.refined >= REFINED_ENOUGH:
        keep_curve(cache_dir() / "costs.json", machine_and_model(steps), curve)
        curve.refined = 0


def measure_steps(steps: Steps, cache: SlotCache | None = None) -> CostCurve:
    """Time steps with more and more rows, in the shape of a tree."""
    model = steps.model
    context = min(CONTEXT, (model.support.max_positions or CONTEXT) // 2)
    cache = cache or SlotCache(1, MEASURED_CELLS)

    def step(rows: int) -> None:
        steps.start(tree_plan(rows, context, model.vocab_size), cache, (), TOP)()

    most = steps.room.rows or MEASURED[-1]
    return measure(step, [rows for rows in MEASURED if rows <= most], stepped=steps.room.packed)


def tree_plan(rows: int, context: int, vocab_size: int) -> Plan:
    """A step of so many rows after a context, in which every node has two children."""
    places = np.arange(rows - 1, dtype=np.int32)
    depths = np.log2(places + 2).astype(np.int32)
    tree = TokenTree(places % vocab_size, (places - 2) // 2, depths, places, places.astype(np.float32), places)
    return Plan([SequencePlan(np.zeros(1, np.int64), context, tree=tree)])


def machine_and_model(steps: Steps) -> str:
    """Everything the cost of a step depends on, as far as it can be named."""
    model = steps.model
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
        steps.name,
        device.type,
        place,
        torch.get_num_threads(),
        torch.__version__,
    ]
    return " ".join(map(str, facts))
