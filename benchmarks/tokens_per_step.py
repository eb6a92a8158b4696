"""Tokens per step of every drafter alone and of all of them together, at several row budgets.

    python benchmarks/tokens_per_step.py --data DIR --suites mt_bench,humaneval,gsm8k --limit 40

Every strategy decodes the first prompts of each suite in order, one at a time. It starts with an empty draft state and
keeps it from prompt to prompt (`/fresh`: emptied before each prompt). All outputs are compared with `model.generate`'s.
Prints a table and one JSON line. `--workers` decodes several cells of the table at once: tokens per step do not depend
on the speed.

`--sampling temperature=0.7,top_p=0.9` samples, prompt i with seed i, in both; `/no_noise` then ranks drafts without the
noise that they will meet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from prompts import generate, parse_arguments, read_prompts
from rich.console import Console
from rich.table import Table

import lookfar
import lookfar.sampling.noise as noise
from lookfar.core.progress import progress_bar
from lookfar.engine.stats import add_up, is_natural

# Lookahead (window, ngram, guesses) that fits a budget; its window has a fixed number of rows.
LOOKAHEAD = {8: (1, 3, 2), 16: (2, 4, 3), 64: (8, 5, 8)}
LOOK_AHEAD = noise.LOOK_AHEAD
EVERY = "auto,auto/fresh,suffix,recycle,trie,lookahead,prompt_lookup,jacobi"

_lm: lookfar.LM | None = None
_options: argparse.Namespace


def start_worker(options: argparse.Namespace) -> None:
    global _lm, _options
    if options.workers > 1:
        torch.set_num_threads(1)
    _lm = lookfar.load(options.model, dtype=options.dtype, device=options.device, max_batch=1)
    _options = options


def strategy_of(name: str, budget: int) -> tuple[Any, int | None]:
    """Return the strategy and the budget for a cell of the table."""
    if name == "lookahead":
        window, ngram, guesses = LOOKAHEAD[budget]
        return lookfar.Lookahead(window=window, ngram=ngram, guesses=guesses), None
    if name == "prompt_lookup":
        return lookfar.PromptLookup(length=min(10, budget - 1)), None
    if name == "jacobi":
        return lookfar.Jacobi(block=budget - 1), None
    return name, budget


def run_cell(suite: str, name: str, budget: int) -> dict[str, Any]:
    """Decode the prompts of a suite with one strategy and budget; `generate` is transformers itself."""
    assert _lm is not None
    prompts = read_prompts(_lm, _options.data / f"{suite}.jsonl", _options.limit)
    outputs, stats = [], []
    strategy, rows = strategy_of(name.partition("/")[0], budget)
    noise.LOOK_AHEAD = 0 if name.endswith("/no_noise") else LOOK_AHEAD
    _lm.forget()
    arguments = parse_arguments(_options.sampling)
    for seed, prompt in enumerate(prompts, _options.seed):
        if name == "generate":
            outputs.append(generate(_lm, prompt, _options.max_new_tokens, seed, **arguments)[0])
            continue
        if name.endswith("/fresh"):
            _lm.forget()
        done = _lm.generate(
            prompt, max_new_tokens=_options.max_new_tokens, strategy=strategy, budget=rows, seed=seed, **arguments
        )
        outputs.append(done.token_ids)
        stats.append(done.stats)
    weights = [(model.sources, model.weights.tolist()) for model in _lm.draft_state.acceptance_models]
    return {"suite": suite, "name": name, "budget": budget, "outputs": outputs, "stats": stats, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suites", default="mt_bench,humaneval,gsm8k")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budgets", default="8,16,64")
    parser.add_argument("--strategies", default=EVERY)
    parser.add_argument("--sampling", default="", metavar="KEY=VALUE,…", help="sample with these arguments")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--weights", type=Path, help="write the weights of the acceptance models to this file")
    options = parser.parse_args()
    lookfar.load(options.model, device="cpu")  # fetch the model once, before the workers ask for it

    suites, budgets = options.suites.split(","), [int(b) for b in options.budgets.split(",")]
    names = options.strategies.split(",")
    cells = [(s, "generate", 1) for s in suites]
    cells += [(s, name, b) for b in sorted(budgets, reverse=True) for name in names for s in suites]
    context = multiprocessing.get_context("spawn")
    results: dict[tuple[str, str, int], dict[str, Any]] = {}
    pool = ProcessPoolExecutor(options.workers, context, initializer=start_worker, initargs=(options,))
    with pool, progress_bar("Decoding", len(cells)) as advance:
        for done in as_completed([pool.submit(run_cell, *cell) for cell in cells]):
            cell = done.result()
            results[cell["suite"], cell["name"], cell["budget"]] = cell
            print(cell["suite"], cell["name"], cell["budget"], file=sys.stderr, flush=True)
            advance(1)

    rows = [summary(results, *cell) for cell in cells if cell[1] != "generate"]
    show(rows, suites, budgets, names)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(
        json.dumps(
            {
                "machine": where,
                "torch": torch.__version__,
                "limit": options.limit,
                "sampling": options.sampling,
                "cells": rows,
            }
        )
    )
    if options.weights:
        options.weights.write_text(json.dumps({" ".join(map(str, k)): v["weights"] for k, v in results.items()}))


def summary(results: dict[tuple[str, str, int], dict[str, Any]], suite: str, name: str, budget: int) -> dict[str, Any]:
    expected, cell = results[suite, "generate", 1]["outputs"], results[suite, name, budget]
    natural = [is_natural(tokens) for tokens in expected]
    total = add_up(cell["stats"])
    without_loops = add_up(s for s, is_one in zip(cell["stats"], natural, strict=True) if is_one)
    return {
        "suite": suite,
        "strategy": name,
        "budget": budget,
        "identical": sum(a == b for a, b in zip(expected, cell["outputs"], strict=True)),
        "prompts": len(expected),
        "natural": sum(natural),
        "tokens_per_step": total.tokens_per_step,
        "tokens_per_step_natural": without_loops.tokens_per_step,
        "rows_per_step": total.rows_per_step,
        "host_microseconds": 1e6 * total.host_seconds / max(total.steps, 1),
    }


def show(rows: list[dict[str, Any]], suites: list[str], budgets: list[int], names: list[str]) -> None:
    title = "tokens per step, all / natural"
    table = Table("budget", "strategy", *suites, "mean", "rows/step", "identical", title=title)
    for budget in budgets:
        for name in names:
            cells = [r for s in suites for r in rows if (r["suite"], r["strategy"], r["budget"]) == (s, name, budget)]
            both = [(r["tokens_per_step"], r["tokens_per_step_natural"]) for r in cells]
            means = [sum(column) / len(cells) for column in zip(*both, strict=True)]
            table.add_row(
                str(budget),
                name,
                *(f"{a:.2f} / {b:.2f}" for a, b in both),
                f"{means[0]:.2f} / {means[1]:.2f}",
                f"{sum(r['rows_per_step'] for r in cells) / len(cells):.1f}",
                f"{sum(r['identical'] for r in cells)}/{sum(r['prompts'] for r in cells)}",
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
