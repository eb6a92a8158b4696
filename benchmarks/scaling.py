"""Past one process, by simulation: ranks of lookahead parallelism, and the shared draft store of a fleet.

    python benchmarks/scaling_record.py texts --data DIR && python benchmarks/scaling_record.py rows --data DIR
    python benchmarks/scaling.py --recorded .recorded --out docs

The first line records what the demo model does (hours on two cores; `--limit` for fewer). The second needs no model:
it reads step costs from docs/results/gpu.json and bench.json, and writes docs/results/scaling.json and the plots.
Assumptions are in docs/scaling.md, scaling_ranks.py and scaling_fleet.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from scaling_fleet import Text, fleet, requests
from scaling_ranks import RANKS, Choice, Machine, interpolated, law, trees, windows

from lookfar.bench.plots import Axes, lines

DOCS = Path(__file__).parent.parent / "docs"
HOST = (0.024, (0.183 - 0.024) / 63)  # docs/benchmarks.md, "Host time": 1 × 1 and 1 × 64 rows
EXCHANGE_GPU, EXCHANGE_CPU = (
    0.1,
    1.0,
)  # assumed: two small collectives, over NVLink with NCCL and over Ethernet with gloo
# Tokens per step of `auto`, all outputs, mean of MT-bench, HumanEval and GSM8K (docs/benchmarks.md).
AUTO = ((1, 1.0), (8, 2.47), (16, 3.0), (64, 4.17))
PAPER = (0.425, 3.106)  # α and f of the paper for 7B on MT-bench
PAPER_TOKENS, PAPER_SPEED = {"mt_bench": 1.96}, {"mt_bench": 1.64, "humaneval": 2.25}
PAPER_EIGHT = 3.87  # HumanEval on eight GPUs
FLEETS, EACH, SEEDS = (1, 2, 4, 8, 16), 12, 5
REPEATS = (0.0, 0.25)


def machines() -> list[Machine]:
    steps = json.loads((DOCS / "results" / "gpu.json").read_text())["steps"]
    costs = json.loads((DOCS / "results" / "bench.json").read_text())["costs"]
    of_8b = [
        (s["rows"], s["ms"])
        for s in steps
        if s["mode"].startswith("cuda graphs compiled")
        and (s["context"], s.get("requests", 1)) == (512, 1)
        and "rows" in s
    ]
    cpu = sorted((int(rows), 1000 * seconds) for rows, seconds in costs.items())
    return [
        Machine("Llama-3-8B's shape, H200", tuple(of_8b), HOST, EXCHANGE_GPU),
        Machine("SmolLM2-135M, two CPU cores", tuple(cpu), HOST, EXCHANGE_CPU),
    ]


def acceptance(recorded: Path) -> list[tuple[float, float]]:
    """Return tokens per step by rows: the published table, continued by what was measured for more rows.

    The recorded prompts are fewer, so that only their ratio to 64 rows is used.
    """
    found = json.loads((recorded / "rows.json").read_text())
    by_rows: dict[int, list[float]] = {}
    for key, cell in found.items():
        by_rows.setdefault(int(key.split()[1]), []).append(cell["tokens_per_step"])
    base = mean(by_rows[64])
    more = [(rows, AUTO[-1][1] * mean(cells) / base) for rows, cells in sorted(by_rows.items()) if rows > 64]
    return [*AUTO, *more]


def code_f() -> float:
    """Return f for HumanEval with the paper's α: tokens per step ÷ speed-up are taken to be those of MT-bench."""
    tokens = PAPER_SPEED["humaneval"] * PAPER_TOKENS["mt_bench"] / PAPER_SPEED["mt_bench"]
    alpha, f = PAPER
    expected = law(alpha, f, 5, 15) * f - f + 1
    return (expected - 1) / (tokens - 1)


def simulate_ranks(points: Seq[tuple[float, float]]) -> dict[str, Any]:
    rows = json.loads((DOCS / "results" / "lookahead.json").read_text())["rows"]
    ours = next((row["alpha"], row["f"]) for row in rows if row["section"] == "law")
    laws = {"paper, MT-bench": PAPER, "paper, HumanEval": (PAPER[0], code_f()), "demo model, MT-bench": ours}
    accepted = partial(interpolated, points)
    report: dict[str, Any] = {"acceptance": points, "laws": laws, "machines": []}
    for machine in machines():
        cells: dict[str, list[Choice]] = {"auto": [trees(machine, ranks, accepted) for ranks in RANKS]}
        for name, (alpha, f) in laws.items():
            cells[f"lookahead ({name})"] = [windows(machine, ranks, alpha, f) for ranks in RANKS]
        slow = replace(machine, exchange=10 * machine.exchange)
        cells["auto, exchange ten times slower"] = [trees(slow, ranks, accepted) for ranks in RANKS]
        report["machines"].append(asdict(machine) | {"cells": {k: [asdict(c) for c in v] for k, v in cells.items()}})
    return report


def simulate_fleet(texts: Seq[Text]) -> dict[str, Any]:
    """Every replica answers `EACH` requests; and all requests are split over the replicas."""
    cells = []
    for repeats in REPEATS:
        for replicas in (n for n in FLEETS if n * EACH <= len(texts)):
            for kind, number in (("growing", replicas * EACH), ("split", max(FLEETS) * EACH)):
                if number > len(texts):
                    continue
                cell: dict[str, Any] = {"kind": kind, "repeats": repeats, "replicas": replicas, "requests": number}
                for name, shared in (("own", False), ("shared", True)):
                    runs = [fleet(requests(texts, number, repeats, seed), replicas, shared) for seed in range(SEEDS)]
                    cell[name] = sum(run.tokens for run in runs) / sum(run.steps for run in runs)
                cells.append(cell)
                print(cell, flush=True)
    return {"texts": len(texts), "tokens": sum(len(output) for _, output in texts), "cells": cells}


def plots(report: dict[str, Any]) -> dict[str, str]:
    """Return the drawings by file name."""
    gpu, cpu = (one["cells"] for one in report["ranks"]["machines"])

    def curve(cells: Seq[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(cell["ranks"], cell["speed_up"]) for cell in cells]

    ranks = {
        "auto, 8B": curve(gpu["auto"]),
        "lookahead, 8B, code": curve(gpu["lookahead (paper, HumanEval)"]),
        "lookahead, 8B, chat": curve(gpu["lookahead (paper, MT-bench)"]),
        "auto, CPU": curve(cpu["auto"]),
    }
    growing = [cell for cell in report["fleet"]["cells"] if cell["kind"] == "growing"]

    def line(repeats: float, name: str) -> list[tuple[float, float]]:
        return [(cell["replicas"], cell[name]) for cell in growing if cell["repeats"] == repeats]

    stores = {
        "shared, 25 % repeats": line(0.25, "shared"),
        "own, 25 % repeats": line(0.25, "own"),
        "shared, all new": line(0.0, "shared"),
        "own, all new": line(0.0, "own"),
    }
    return {
        "ranks.svg": lines(
            "Simulated speed of one stream on several ranks", ranks, Axes("ranks", "× one rank, no drafts")
        ),
        "fleet.svg": lines(
            f"Simulated tokens per step of a fleet, {EACH} requests a replica",
            stores,
            Axes("replicas", "tokens per step", log=True, base=1.0),
        ),
    }


def ranks_table(report: dict[str, Any]) -> str:
    """Return the table of ranks: speed-ups, with tokens per step."""
    shown = (1, 2, 4, 8)
    rows = [
        "| speed-up over one rank without speculation (tokens per step) | " + " | ".join(f"{r} ranks" for r in shown)
    ]
    rows[0] = rows[0].replace(" 1 ranks", " 1 rank") + " |"
    rows.append("|---" * (len(shown) + 1) + "|")
    for machine in report["ranks"]["machines"]:
        for name, cells in machine["cells"].items():
            found = [cell for cell in cells if cell["ranks"] in shown]
            figures = " | ".join(f"{one['speed_up']:.2f}× ({one['tokens_per_step']:.2f})" for one in found)
            rows.append(f"| {machine['name']}: {name} | {figures} |")
    return "\n".join(rows)


def fleet_table(report: dict[str, Any]) -> str:
    """Return the table of fleets: tokens per step with a store each → with a shared one."""
    cells = report["fleet"]["cells"]
    sizes = sorted({cell["replicas"] for cell in cells})
    names = [f"{size} replica{'s' * (size > 1)}" for size in sizes]
    rows = ["| tokens per step, own stores → shared | " + " | ".join(names) + " |", "|---" * (len(sizes) + 1) + "|"]
    for kind, words in (("growing", f"{EACH} requests a replica"), ("split", "all requests split")):
        for repeats in REPEATS:
            found = [cell for cell in cells if cell["kind"] == kind and cell["repeats"] == repeats]
            figures = " | ".join(f"{cell['own']:.2f} → {cell['shared']:.2f}" for cell in found)
            if found:
                rows.append(f"| {words}, {100 * repeats:.0f} % repeated | {figures} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, default=Path(".recorded"), help="a folder of texts.json and rows.json")
    parser.add_argument("--out", type=Path, default=DOCS, help="a folder with the folders results and img")
    options = parser.parse_args()
    found = json.loads((options.recorded / "texts.json").read_text())
    texts = [(prompt, output) for suite in found.values() for prompt, output in suite if output]
    report = {"ranks": simulate_ranks(acceptance(options.recorded)), "fleet": simulate_fleet(texts)}
    report["fleet"]["suites"] = {suite: len(one) for suite, one in found.items()}
    (options.out / "results" / "scaling.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, drawing in plots(report).items():
        (options.out / "img" / name).write_text(drawing + "\n")
    print(ranks_table(report), fleet_table(report), sep="\n\n")


if __name__ == "__main__":
    main()
