"""The speed-up on a CPU: `model.generate`, this engine without speculation, and `auto`, in turn on each prompt.

    python benchmarks/cpu_speed.py --data DIR --suites mt_bench,humaneval,gsm8k --limit 20
    python benchmarks/cpu_speed.py --data DIR --suites random --limit 10

The draft state is empty at the start of a suite and kept from prompt to prompt (`--fresh`: never kept). `random` are
prompts of random tokens sampled at temperature 2, prompt i with seed i: hardly any draft is accepted there. Speed-ups
are medians over prompts. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from prompts import generate, read_prompts
from rich.console import Console
from rich.table import Table

import lookfar
from lookfar.core.progress import progress_bar
from lookfar.engine.stats import Stats, add_up, is_natural

METHODS = ("generate", "none", "auto")


def random_prompts(lm: lookfar.LM, count: int) -> list[list[int]]:
    rows = torch.randint(0, lm.engine.runner.model.vocab_size, (count, 64), generator=torch.Generator().manual_seed(0))
    return [row.tolist() for row in rows]


def decode(
    lm: lookfar.LM, name: str, prompt: list[int], new: int, seed: int, arguments: dict[str, Any]
) -> tuple[list[int], float, Stats]:
    """Run one method on one prompt; return its tokens, its seconds and its counts."""
    if name == "generate":
        return *generate(lm, prompt, new, seed, **arguments), Stats()
    start = perf_counter()
    done = lm.generate(prompt, max_new_tokens=new, strategy=name, seed=seed, **arguments)
    return done.token_ids, perf_counter() - start, done.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suites", default="mt_bench,humaneval,gsm8k")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--fresh", action="store_true", help="empty the draft state before each prompt")
    options = parser.parse_args()
    lm = lookfar.load(options.model, device="cpu", dtype="float32", max_batch=1)
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "packed_bytes": lm.engine.runner.model.packed_bytes,
        "suites": {},
    }
    for suite in options.suites.split(","):
        noisy = suite == "random"
        arguments = {"temperature": 2.0, "top_k": 0} if noisy else {}
        prompts = (
            random_prompts(lm, options.limit)
            if noisy
            else read_prompts(lm, options.data / f"{suite}.jsonl", options.limit)
        )
        for name in METHODS:  # the first passes of a process are slow
            decode(lm, name, prompts[0], 8, 0, {})
        lm.forget()
        rows = []
        with progress_bar(suite, len(prompts)) as advance:
            for seed, prompt in enumerate(prompts):
                if options.fresh:
                    lm.forget()
                rows.append({n: decode(lm, n, prompt, options.max_new_tokens, seed, arguments) for n in METHODS})
                advance(1)
        report["suites"][suite] = {
            "all": summary(rows),
            "natural": summary([row for row in rows if is_natural(row["generate"][0])]),
        }
    curve = lm.engine.speculator.costs
    assert curve is not None
    report["milliseconds"] = {int(n): 1e3 * s for n, s in zip(curve.rows, curve.seconds, strict=True)}
    show(report)
    print(json.dumps(report))


def summary(rows: list[dict[str, tuple[list[int], float, Stats]]]) -> dict[str, float]:
    def times(slow: str, fast: str) -> float:
        return median(row[slow][1] / row[fast][1] for row in rows)

    stats = add_up(row["auto"][2] for row in rows)
    return {
        "prompts": len(rows),
        "identical": sum(row["generate"][0] == row["none"][0] == row["auto"][0] for row in rows),
        "auto_over_generate": times("generate", "auto"),
        "auto_over_none": times("none", "auto"),
        "none_over_generate": times("generate", "none"),
        "worst_over_none": min(row["none"][1] / row["auto"][1] for row in rows),
        "tokens_per_step": stats.tokens_per_step,
        "rows_per_step": stats.rows_per_step,
        "host_microseconds": 1e6 * stats.host_seconds / stats.steps,
    }


def show(report: dict[str, Any]) -> None:
    table = Table("suite", "outputs", "identical", "auto ÷ generate", "auto ÷ none", "none ÷ generate", "tokens/step")
    table.add_column("rows/step")
    for suite, parts in report["suites"].items():
        for which, r in parts.items():
            table.add_row(
                suite,
                f"{which} ({r['prompts']})",
                f"{r['identical']}/{r['prompts']}",
                *(f"{r[k]:.2f}×" for k in ("auto_over_generate", "auto_over_none", "none_over_generate")),
                f"{r['tokens_per_step']:.2f}",
                f"{r['rows_per_step']:.1f}",
            )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
