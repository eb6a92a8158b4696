"""The cost of a row on a CPU: linear layers by themselves, and whole steps of the demo model.

    python benchmarks/cpu_rows.py [layers] [steps] [batches]

Steps of torch with packed weights and without, and compiled steps, also with all weights in float32; steps of batches,
by torch and compiled.

Weights of 160 MB in layers of one shape, so that they come from memory as in a model. Milliseconds, medians. Prints
tables and one JSON line. Bounded by memory bandwidth for few rows, by arithmetic for many. Variants are not measured in
turn: for a while after a product, torch's threads keep the cores busy.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import lookfar
from lookfar.core.arrays import Floats
from lookfar.core.jit import jit
from lookfar.core.plan import StepPlan
from lookfar.core.torch_threads import one_torch_thread
from lookfar.engine.costs import MEASURED_LENGTH, measure_steps, own_cache, tree_plan
from lookfar.kernels.cpu.blocks import multiply
from lookfar.kernels.cpu.formats import FORMATS, NAMES, packed_size, write_panels
from lookfar.kernels.cpu.layout import padded
from lookfar.kernels.cpu.team import run_together
from lookfar.kernels.cpu.tiles import BFLOAT16, FLOAT16, FLOAT32, UINT8
from lookfar.models.binding import BoundModel
from lookfar.models.packed_matrix import aligned
from lookfar.models.self_check import taken_slots
from lookfar.retrieval.recycle_table import TOP_K
from lookfar.runners.compiled_cpu import CompiledRunner

ROWS = (1, 2, 4, 8, 16, 32, 64)
BATCHES, BATCH_ROWS = (1, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128)
SHAPES = {"1536×576": (1536, 576, 45), "49152×576": (49152, 576, 1)}
WAYS = ("torch", "torch, packed", "compiled, float32", "compiled")
reorder, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise


def _multiply_all(blocks, rows, length, weights, y, columns, counters, threads):  # type: ignore[no-untyped-def]
    """Multiply rows with several packed weights of one shape, one after the other."""
    first, kind, size = weights
    for index in range(len(counters)):
        weight, counter = (first + index * size, kind), counters.ctypes.data + 8 * index
        multiply(blocks, rows, length, weight, y, columns, 0, counter, threads)


multiply_all = jit(_multiply_all, nogil=True)


def rounded(weight: torch.Tensor, kind: int) -> torch.Tensor:
    """Return a matrix whose numbers fit a format."""
    if kind == UINT8:
        return (weight * 16).round().clamp(-127, 127) / 32
    return {BFLOAT16: weight.bfloat16().float(), FLOAT16: weight.half().float()}.get(kind, weight)


def layers(outputs: int, inputs: int, count: int, rows: int) -> dict[str, float]:
    """Return the milliseconds of all layers of a shape for each variant."""
    weights = [torch.randn(outputs, inputs) for _ in range(count)]
    packed = {hint: [reorder(w, hint) for w in weights] for hint in (1, 8)}
    x = torch.randn(1, rows, inputs)
    blocks, y = np.zeros(padded(rows) * inputs, np.float32), np.zeros((padded(rows), outputs), np.float32)

    def tiles(kind: int) -> Callable[[], None]:
        size = packed_size(weights[0], kind)
        panels = aligned(size * count)
        for index, weight in enumerate(weights):
            assert write_panels(rounded(weight, kind), kind, panels[index * size : (index + 1) * size])

        def run() -> None:
            threads, counters = torch.get_num_threads(), np.zeros(count, np.int64)

            def part(rank: int) -> None:
                packed = panels.ctypes.data, kind, size
                multiply_all(blocks.ctypes.data, rows, inputs, packed, y.ctypes.data, outputs, counters, threads)

            run_together(part, threads)

        return run

    variants: dict[str, Callable[[], object]] = {
        "F.linear": lambda: [torch.nn.functional.linear(x, w) for w in weights],
        "W @ x.T": lambda: [(w @ x[0].T).T.contiguous() for w in weights],
        "packed for 1 row": lambda: [linear(x, w, None, "none", [], "") for w in packed[1]],
        "packed for 8 rows": lambda: [linear(x, w, None, "none", [], "") for w in packed[8]],
        **{f"compiled, {NAMES[kind]}": tiles(kind) for kind in FORMATS},
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, run in variants.items():
        for turn in range(8):
            start = perf_counter()
            run()
            times[name].extend([1e3 * (perf_counter() - start)] * (turn > 0))
    return {name: median(found) for name, found in times.items()}


def runners(lm: lookfar.LM) -> dict[str, CompiledRunner]:
    """Return the ways to run steps."""
    found = {name: CompiledRunner(BoundModel(lm.model, pack=name != "torch")) for name in WAYS}
    found["torch, packed"].model.refuse_compiled("to measure torch")
    with patch("lookfar.models.packed_matrix.format_of", lambda *_: FLOAT32):
        found["compiled, float32"].model.pack()
    return found


def step_costs(runner: CompiledRunner) -> Floats:
    """Return the seconds of a step by its rows."""
    return measure_steps(runner, own_cache(runner, MEASURED_LENGTH)).table(64)


def batch_plan(batch: int, rows: int, vocab_size: int, even: bool) -> StepPlan:
    """Return a step of requests after contexts of 64 … 448 tokens, its draft rows shared evenly or halved in turn."""
    requests, left = [], rows - batch
    for i in range(batch):
        share = left // (batch - i) if even else (left + 1) // 2 if i < batch - 1 else left
        left -= share
        context = 256 if batch == 1 else 64 + i * 384 // (batch - 1)
        requests.append(replace(tree_plan(1 + share, context, vocab_size).requests[0], kv=i))
    return StepPlan(requests, TOP_K)


def batch_costs(ways: dict[str, CompiledRunner], batch: int, rows: int) -> dict[str, float]:
    """Return the milliseconds of steps of a batch, its rows shared in two ways."""
    times: dict[str, list[float]] = {}
    for name, runner in ways.items():
        cache = taken_slots(batch, MEASURED_LENGTH)
        with one_torch_thread() if runner.limits.own_threads else nullcontext():  # as in the engine
            for turn in range(9):
                for even in (True, False):
                    plan = batch_plan(batch, rows, runner.model.vocab_size, even)
                    start = perf_counter()
                    runner.launch(plan, cache).result()
                    key = f"{name}, {'even' if even else 'uneven'}"
                    times.setdefault(key, []).extend([1e3 * (perf_counter() - start)] * (turn > 0))
    return {name: median(found) for name, found in times.items()}


def show_layers(out: Console) -> dict[str, Any]:
    report = {}
    for name, (outputs, inputs, count) in SHAPES.items():
        found = report[name] = {rows: layers(outputs, inputs, count, rows) for rows in ROWS}
        table = Table("rows", *found[1], title=f"{count} layers of {name}, milliseconds")
        for rows, variants in found.items():
            table.add_row(str(rows), *(f"{ms:.1f}" for ms in variants.values()))
        out.print(table)
    return report


def show_steps(out: Console) -> dict[str, Any]:
    lm = lookfar.load("demo", device="cpu", dtype="float32")
    steps = {name: step_costs(runner) for name, runner in runners(lm).items()}
    table = Table("rows", *steps, title="a step of SmolLM2-135M after 256 tokens, milliseconds")
    for rows in ROWS:
        table.add_row(str(rows), *(f"{1e3 * curve[rows]:.1f}" for curve in steps.values()))
    out.print(table)
    return {"step": {rows: [1e3 * float(curve[rows]) for curve in steps.values()] for rows in ROWS}}


def show_batches(out: Console) -> dict[str, Any]:
    ways = runners(lookfar.load("demo", device="cpu", dtype="float32"))
    del ways["torch"], ways["compiled, float32"]
    report: dict[str, Any] = {}
    for batch in BATCHES:
        found = {rows: batch_costs(ways, batch, rows) for rows in BATCH_ROWS if rows >= batch}
        table = Table("rows", *found[batch], title=f"a step of {batch} requests, milliseconds")
        for rows, variants in found.items():
            table.add_row(str(rows), *(f"{ms:.1f}" for ms in variants.values()))
        out.print(table)
        report[f"batch {batch}"] = found
    return report


SECTIONS = {"layers": show_layers, "steps": show_steps, "batches": show_batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"{', '.join(SECTIONS)}; all of them unless given")
    out, report = Console(width=110), {"machine": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    sections = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    for section in sections:
        report |= SECTIONS[section](out)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
