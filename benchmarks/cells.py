"""`auto` over no speculation for several numbers of requests: greedy, sampled, and texts that nothing predicts.

    python benchmarks/cells.py --data DIR --requests 1,4,8 --new 96        # on a GPU: benchmarks/gpu.py --only cells

A *closed* batch is done when its slowest text is. Where texts are *queued*, sixty or twice as many as run at once, each
that ends makes room for another one, as in a server. Every cell starts from an empty draft state, its two modes in turn
and twice; the faster of the two runs counts. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from prompts import read_prompts

import lookfar
from lookfar.engine.stats import add_up, is_natural
from lookfar.lm import Completion

SUITES = ("mt_bench", "humaneval", "gsm8k")
MODES = ("none", "auto")
QUEUED, CLOSED = 60, 10  # texts of a cell at the least


@dataclass(frozen=True)
class Texts:
    """Prompts, how many tokens to decode after each, and how."""

    name: str
    prompts: list[list[int]]
    new: int
    sampling: dict[str, Any] = field(default_factory=dict)


def all_texts(lm: lookfar.LM, data: Path, each: int, new: int, suites: Seq[str] = SUITES) -> list[Texts]:
    """Return real prompts, greedy and sampled, and random ones at temperature 2."""
    of_suites = [read_prompts(lm, data / f"{suite}.jsonl", each) for suite in suites]
    real = [prompt for alike in zip(*of_suites, strict=True) for prompt in alike]
    noise = np.random.default_rng(0).integers(1000, lm.tokenizer.vocab_size - 1000, (128, 40)).tolist()

    def sampled(temperature: float) -> dict[str, Any]:
        return {"do_sample": True, "temperature": temperature, "seed": 1}

    return [
        Texts("greedy", real, new),
        Texts("temperature 0.7", real, new, sampled(0.7)),
        Texts("temperature 1", real, new // 2, sampled(1.0)),
        Texts("random prompts, temperature 2", noise, new // 2, sampled(2.0)),
    ]


def measure(lm: lookfar.LM, texts: Texts, size: int, queued: bool) -> dict[str, Any]:
    """Decode texts, `size` at once, with and without speculation."""
    lm.engine.scheduler.max_batch = size
    chosen = texts.prompts[: max(2 * size, QUEUED) if queued else max(size, CLOSED)]
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    done: dict[str, list[Completion]] = {}
    for mode in 2 * MODES:
        lm.forget()
        began = perf_counter()
        step = len(chosen) if queued else size
        groups = [chosen[i : i + step] for i in range(0, len(chosen) - len(chosen) % step, step)]
        runs = [lm.generate(group, max_new_tokens=texts.new, strategy=mode, **texts.sampling) for group in groups]
        done[mode] = [one for run in runs for one in run]
        seconds[mode].append(perf_counter() - began)
    total = {mode: add_up(one.stats for one in found) for mode, found in done.items()}
    natural = add_up(one.stats for one in done["auto"] if is_natural(one.token_ids))
    rates = {mode: total[mode].tokens / min(times) for mode, times in seconds.items()}
    first = {mode: total[mode].tokens / times[0] for mode, times in seconds.items()}
    pairs = zip(done["none"], done["auto"], strict=True)
    return {
        "requests": size,
        "queued": queued,
        "texts": texts.name,
        "none": rates["none"],
        "auto": rates["auto"],
        "ratio": rates["auto"] / rates["none"],
        "first_ratio": first["auto"] / first["none"],
        "tokens_per_step": total["auto"].tokens_per_step,
        "natural_tokens_per_step": natural.tokens_per_step,
        "rows_per_step": total["auto"].rows_per_step,
        "host_microseconds": 1e6 * total["auto"].host_seconds / max(total["auto"].steps, 1),
        "different": sum(a.token_ids != b.token_ids for a, b in pairs),
    }


def cells(lm: lookfar.LM, texts: Seq[Texts], sizes: Seq[tuple[int, bool]]) -> Iterator[dict[str, Any]]:
    """Measure all texts with all numbers of requests, closed or queued."""
    for one in texts:
        for size, queued in sizes:
            yield measure(lm, one, size, queued)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--requests", default="1,4,8")
    parser.add_argument("--each", type=int, default=6, help="prompts of each suite")
    parser.add_argument("--new", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--queued", action="store_true", help="all texts at once instead of closed batches")
    parser.add_argument("--only", default="", help="the beginning of the name of the texts to measure")
    options = parser.parse_args()
    sizes = [int(size) for size in options.requests.split(",")]
    lm = lookfar.load("demo", device="cpu", dtype="float32", max_batch=max(sizes))
    lm.warmup(requests=max(sizes), sampling=True)
    texts = all_texts(lm, options.data, options.each, options.new, options.suites.split(","))
    rows = []
    for row in cells(lm, [t for t in texts if t.name.startswith(options.only)], [(s, options.queued) for s in sizes]):
        print(" · ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        rows.append(row)
    print(json.dumps({"cells": rows}))


if __name__ == "__main__":
    main()
