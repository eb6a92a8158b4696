"""The cost of a row on a CPU: linear layers by themselves, and whole steps of the demo model, packed and not.

    python benchmarks/cpu_rows.py

Weights of 160 MB in layers of one shape, so that they come from memory as in a model. Milliseconds, medians, all
variants in turn. Prints tables and one JSON line. Bounded by memory bandwidth for few rows, by arithmetic for many.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

import lookfar
from lookfar.core.arrays import Floats
from lookfar.engine.costs import MEASURED_LENGTH, measure_steps
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import one_slot
from lookfar.runners.eager import EagerRunner

ROWS = (1, 2, 4, 8, 16, 32, 64)
SHAPES = {"1536×576": (1536, 576, 45), "49152×576": (49152, 576, 1)}
reorder, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise


def layers(outputs: int, inputs: int, count: int, rows: int) -> dict[str, float]:
    """Return the milliseconds of all layers of a shape for each variant."""
    weights = [torch.randn(outputs, inputs) for _ in range(count)]
    packed = {hint: [reorder(w, hint) for w in weights] for hint in (1, 8)}
    x = torch.randn(1, rows, inputs)
    variants: dict[str, Callable[[], object]] = {
        "F.linear": lambda: [torch.nn.functional.linear(x, w) for w in weights],
        "W @ x.T": lambda: [(w @ x[0].T).T.contiguous() for w in weights],
        "packed for 1 row": lambda: [linear(x, w, None, "none", [], "") for w in packed[1]],
        "packed for 8 rows": lambda: [linear(x, w, None, "none", [], "") for w in packed[8]],
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(7):
        for name, run in variants.items():
            start = perf_counter()
            run()
            times[name].append(1e3 * (perf_counter() - start))
    return {name: median(found) for name, found in times.items()}


def step_costs(lm: lookfar.LM, pack: bool) -> Floats:
    """Return the seconds of a step by its rows."""
    runner = EagerRunner(BoundModel(lm.model, pack=pack))
    return measure_steps(runner, one_slot(MEASURED_LENGTH), 0).table(64)


def main() -> None:
    out, report = Console(width=110), {"machine": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for name, (outputs, inputs, count) in SHAPES.items():
        found = {rows: layers(outputs, inputs, count, rows) for rows in ROWS}
        table = Table("rows", *found[1], title=f"{count} layers of {name}, milliseconds")
        for rows, variants in found.items():
            table.add_row(str(rows), *(f"{ms:.1f}" for ms in variants.values()))
        out.print(table)
        report[name] = found
    lm = lookfar.load("demo", device="cpu", dtype="float32")
    steps = {pack: step_costs(lm, pack) for pack in (False, True)}
    table = Table("rows", "not packed", "packed", title="a step of SmolLM2-135M after 256 tokens, milliseconds")
    for rows in ROWS:
        table.add_row(str(rows), *(f"{1e3 * curve[rows]:.1f}" for curve in steps.values()))
    out.print(table)
    report["step"] = {rows: [1e3 * float(curve[rows]) for curve in steps.values()] for rows in ROWS}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
