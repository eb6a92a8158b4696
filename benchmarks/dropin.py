"""`model.generate` of an accelerated model: are its outputs the same, and how much faster is it?

    python benchmarks/dropin.py --data DIR --suites mt_bench,humaneval --limit 20

Every setting decodes left-padded batches of real prompts with the original model and with the accelerated one, in
turn, under the same seed, and compares all tokens and the state of the random generator afterwards. Prints a table and
one JSON line. Bounded by memory bandwidth: a step reads all weights; a batch also waits for its longest row.
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
from prompts import parse_arguments, read_prompts
from rich.console import Console
from rich.table import Table

import lookfar
from lookfar.bench.methods import left_padded
from lookfar.core.progress import progress_bar
from lookfar.engine.stats import Stats, add_up

SETTINGS = [
    "",
    "temperature=0.7",
    "temperature=1.0,top_k=0",
    "temperature=0.8,top_k=0,top_p=0.9",
    "temperature=1.0,top_k=0,min_p=0.05",
    "temperature=0.7,repetition_penalty=1.1",
    "temperature=1.2,top_k=40,typical_p=0.9,no_repeat_ngram_size=4",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suites", default="mt_bench,humaneval")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--settings", nargs="*", default=SETTINGS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()

    lm = lookfar.load(options.model, dtype=options.dtype, device=options.device)
    model = lm.model
    suites = [read_prompts(lm, options.data / f"{suite}.jsonl", options.limit) for suite in options.suites.split(",")]
    prompts = [prompt for suite in suites for prompt in suite]
    sizes = [int(size) for size in options.batches.split(",")]
    rows = []
    with progress_bar("Decoding", len(options.settings) * len(sizes) * len(prompts)) as advance:
        for setting in options.settings:
            for size in sizes:
                calls = []
                lookfar.restore(model)  # which drops its draft state
                for start in range(0, len(prompts), size):
                    calls.append(one_call(model, prompts[start : start + size], start, setting, options.max_new_tokens))
                    advance(size)
                rows.append({"setting": setting or "greedy", "batch": size} | summary(calls))
    show(rows)
    where = torch.cuda.get_device_name() if lm.device.type == "cuda" else platform.machine()
    print(json.dumps({"machine": where, "torch": torch.__version__, "dtype": options.dtype, "rows": rows}))


def one_call(model: Any, prompts: list[list[int]], seed: int, setting: str, new: int) -> dict[str, Any]:
    """Decode a batch with and without lookfar; which one comes first alternates between calls."""
    pad = model.generation_config.pad_token_id or 0
    ids, mask = left_padded(prompts, model.device, pad)
    arguments = parse_arguments(setting)
    arguments = {"do_sample": bool(arguments), **arguments, "max_new_tokens": new, "pad_token_id": pad}
    outs, seconds, states = {}, {}, {}
    stats = Stats()
    for side in ("original", "accelerated") if seed % 2 else ("accelerated", "original"):
        how = {"custom_generate": lookfar.generate} if side == "accelerated" else {}
        torch.manual_seed(seed)
        start = perf_counter()
        outs[side] = model.generate(ids, attention_mask=mask, **arguments, **how).cpu()
        seconds[side] = perf_counter() - start
        states[side] = torch.cuda.get_rng_state() if ids.is_cuda else torch.get_rng_state()
        if side == "accelerated":
            stats = lookfar.last_stats(model)
    same = outs["original"].shape == outs["accelerated"].shape
    return {
        "sequences": len(prompts),
        "identical": int((outs["original"] == outs["accelerated"]).all(1).sum()) if same else 0,
        "same_generator": torch.equal(states["original"], states["accelerated"]),
        "ratio": seconds["original"] / seconds["accelerated"],
        "stats": stats,
    }


def summary(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "sequences": sum(call["sequences"] for call in calls),
        "identical": sum(call["identical"] for call in calls),
        "generator_identical": all(call["same_generator"] for call in calls),
        "tokens_per_step": add_up(call["stats"] for call in calls).tokens_per_step,
        "speed_up_over_generate": median(call["ratio"] for call in calls),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("setting", "batch", "identical", "generator", "tokens/step", "generate ÷ accelerated")
    for row in rows:
        table.add_row(
            row["setting"],
            str(row["batch"]),
            f"{row['identical']}/{row['sequences']}",
            "same" if row["generator_identical"] else "differs",
            f"{row['tokens_per_step']:.2f}",
            f"{row['speed_up_over_generate']:.2f}×",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
