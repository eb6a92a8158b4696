"""The cost curve of a model on this machine: measured on first use, kept in the user's cache directory."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch

from lookfar.core.cache_dir import cache_dir
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.progress import progress_bar
from lookfar.core.torch_threads import one_torch_thread
from lookfar.core.tree import DraftTree
from lookfar.kvcache.slots import SlotKVCache
from lookfar.retrieval.recycle_table import TOP_K
from lookfar.runners.base import ModelRunner
from lookfar.speculation.cost_curve import MEASURED_ROWS, CostCurve, measure_curve
from lookfar.speculation.cost_file import Experience, KnownCosts, read_costs, write_costs

REFINED_ENOUGH = 1000  # steps after which a refined curve is kept
CONTEXT = 256  # tokens before the measured steps; real steps correct for longer ones
MEASURED_LENGTH = CONTEXT + 256
MEASURING = "Measuring the cost of a step (once for this model and machine)"


def known_costs(runner: ModelRunner, cache: SlotKVCache, most: int) -> KnownCosts:
    """Return the cost curve of a runner: from the file, or measured.

    Captured steps belong to a KV cache, so they are measured on the engine's own, unless requests are using it.
    """
    known = kept_costs(runner)
    if known is not None:
        return known
    if not runner.limits.captured or cache.order:
        cache = own_cache(runner, MEASURED_LENGTH)
    else:
        cache.reserve(1, MEASURED_LENGTH, most=most, keep=False)
    curve = measure_steps(runner, cache)
    write_costs(costs_file(), machine_and_model(runner), curve, {})
    return KnownCosts(curve)


def kept_costs(runner: ModelRunner) -> KnownCosts | None:
    """Return the cost curve of a runner that the file holds, if any."""
    return read_costs(costs_file(), machine_and_model(runner), runner.limits)


def save_refined_costs(runner: ModelRunner, curve: CostCurve, experience: Mapping[str, Experience]) -> None:
    """Write the curve to the file once `REFINED_ENOUGH` real steps have refined it."""
    if curve.refined >= REFINED_ENOUGH:
        write_costs(costs_file(), machine_and_model(runner), curve, experience)
        curve.refined = 0


def measure_steps(runner: ModelRunner, cache: SlotKVCache, sizes: Seq[int] = MEASURED_ROWS) -> CostCurve:
    """Time steps of several numbers of rows."""
    context = min(CONTEXT, (runner.model.support.max_positions or CONTEXT) // 2)
    most = runner.limits.rows or max(sizes)
    if runner.limits.chain and runner.model.support.max_positions is not None:
        most = min(most, runner.model.support.max_positions - context)
    sizes = [rows for rows in dict.fromkeys((*sizes, *runner.limits.tiles)) if rows <= most]
    with sample_step(runner, cache, context) as step, progress_bar(MEASURING, len(sizes)) as advance:
        return measure_curve(step, sizes, runner.limits, advance)


def own_cache(runner: ModelRunner, length: int) -> SlotKVCache:
    """Return a KV cache for one request of so many tokens, beside that of the engine."""
    whole = runner.limits.recurrent or runner.limits.ranks > 1
    cache = runner.create_cache() if whole else SlotKVCache()
    cache.reserve(1, length, most=1, keep=False)
    return cache


@contextmanager
def sample_step(runner: ModelRunner, cache: SlotKVCache, context: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that runs a step of so many rows, on each rank, after a context, as a tree or as a chain.

    As in the engine, threads of torch do not compete with those of the runner.
    """
    vocab_size, handle = runner.model.vocab_size, cache.allocate()[0]
    shape = chain_plan if runner.limits.chain else partial(tree_plan, ranks=runner.limits.ranks)
    if runner.limits.recurrent:
        fill_state(runner, cache, handle, context)

    def step(rows: int) -> None:
        runner.launch(shape(rows, context, vocab_size, handle), cache).result()

    try:
        with one_torch_thread() if runner.limits.own_threads else nullcontext():
            yield step
    finally:
        cache.free(handle)


def tree_plan(rows: int, context: int, vocab_size: int, handle: int = 0, ranks: int = 1) -> StepPlan:
    """Return a step of so many rows after a context, in which every node has two children; for ranks, one tree each."""
    places = np.arange(rows - 1, dtype=np.int32)
    depths = np.log2(places + 2).astype(np.int32)
    parents = (places - 2) // 2
    trees = [np.where(parents < 0, parents, parents + rank * len(places)) for rank in range(ranks)]
    places, parents, depths = (
        np.arange(ranks * len(places), dtype=np.int32),
        np.concatenate(trees),
        np.tile(depths, ranks),
    )
    tree = DraftTree(np.stack([places % vocab_size, parents, depths, places, places]), places.astype(np.float32))
    return StepPlan([RequestPlan(np.zeros(1, np.int64), context, handle, tree=tree)], TOP_K)


def chain_plan(rows: int, context: int, vocab_size: int, handle: int = 0) -> StepPlan:
    """Return a step of so many rows after a context, one after the other."""
    tree = DraftTree.from_paths([[token % vocab_size for token in range(rows - 1)]])
    return StepPlan([RequestPlan(np.zeros(1, np.int64), context, handle, tree=tree)], TOP_K)


def fill_state(runner: ModelRunner, cache: SlotKVCache, handle: int, context: int) -> None:
    """Process a context, so that there is a recurrent state to continue from."""
    plan = StepPlan([RequestPlan(np.zeros(context, np.int64), 0, handle, complete=False)])
    plan.prefills = True
    runner.launch(plan, cache).result()
    cache.commit(handle, context)


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
        "" if model.decoder is None else model.decoder.nbytes,  # by the formats of its weights
        runner.name,
        device.type,
        place,
        torch.get_num_threads(),
        torch.__version__,
    ]
    return " ".join(map(str, facts))


def costs_file() -> Path:
    return cache_dir() / "costs.json"
