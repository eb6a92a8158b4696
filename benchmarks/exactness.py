"""Lookahead Decoding with several windows: are the outputs those of `model.generate`, and how many tokens per step?

    python benchmarks/exactness.py --data DIR --suite mt_bench --limit 40

DIR holds jsonl files with `format: chat | completion` and `turns` or `prompt`. Prints a table, the prompts that
differ (with the logit margin at the first difference), and one JSON line.

On a CPU every row costs arithmetic, so the seconds say little about a GPU; tokens per step do not depend on the
machine.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from statistics import median
from typing import Any

import torch
from prompts import generate, read_prompts
from rich.console import Console
from rich.table import Table

import lookfar
from lookfar.bench.differences import margin_after
from lookfar.core.ids import first_difference
from lookfar.core.progress import progress_bar
from lookfar.engine.stats import add_up, is_natural

STRATEGIES = {  # lookahead N/W/G
    "none": "none",
    "jacobi": "jacobi",
    "lookahead 4/2/3 + prompt": lookfar.Lookahead(window=2, ngram=4, guesses=3, from_prompt=True),
    "lookahead 5/7/7": lookfar.Lookahead(window=7, ngram=5, guesses=7, from_prompt=False),
    "lookahead 5/15/15": lookfar.Lookahead(window=15, ngram=5, guesses=15, from_prompt=False),
    "lookahead 5/15/15 + prompt": lookfar.Lookahead(window=15, ngram=5, guesses=15, from_prompt=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suite", default="mt_bench")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--batch", type=int, default=8, help="also decode in ragged batches of this size; 0: do not")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    options = parser.parse_args()

    lm = lookfar.load(options.model, dtype=options.dtype, max_batch=max(options.batch, 1))
    prompts = [
        p
        for suite in options.suite.split(",")
        for p in read_prompts(lm, options.data / f"{suite}.jsonl", options.limit)
    ]
    new = options.max_new_tokens
    names = options.strategies.split(",")
    results: dict[str, list[lookfar.Completion]] = {name: [] for name in names}
    expected, baseline = [], []
    generate(lm, prompts[0], 4)
    with progress_bar("Decoding", len(prompts) * (1 + len(names))) as advance:
        for prompt in prompts:  # strategies take turns, so that all of them meet the same noise of the machine
            tokens, seconds = generate(lm, prompt, new)
            expected.append(tokens)
            baseline.append(seconds)
            advance(1)
            for name in names:
                results[name].append(lm.generate(prompt, max_new_tokens=new, strategy=STRATEGIES[name]))
                advance(1)
    natural = [is_natural(tokens) for tokens in expected]
    report: dict[str, Any] = {
        "suite": options.suite,
        "prompts": len(prompts),
        "natural": sum(natural),
        "max_new_tokens": new,
        "dtype": str(lm.model.dtype),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {lm.device}",
        "torch": torch.__version__,
        "strategies": {},
    }
    for name in names:
        done = results[name]
        natural_stats = add_up(d.stats for d, is_one in zip(done, natural, strict=True) if is_one)
        total = add_up(d.stats for d in done)
        wrong = [i for i, (d, e) in enumerate(zip(done, expected, strict=True)) if d.token_ids != e]
        report["strategies"][name] = {
            "identical": len(done) - len(wrong),
            "tokens_per_step": total.tokens_per_step,
            "tokens_per_step_natural": natural_stats.tokens_per_step,
            "rows_per_step": total.rows_per_step,
            "speed_up_over_generate": median(b / d.stats.seconds for b, d in zip(baseline, done, strict=True)),
            "differences": [difference(lm, prompts[i], expected[i], done[i].token_ids) | {"prompt": i} for i in wrong],
        }
    if options.batch:
        with progress_bar(f"Decoding in batches of {options.batch}", len(names)) as advance:
            for name in names:
                batch = lm.generate(prompts, max_new_tokens=new, strategy=STRATEGIES[name])
                same = sum(d.token_ids == e for d, e in zip(batch, expected, strict=True))
                report["strategies"][name]["identical_in_batch"] = same
                advance(1)
    show(report)
    print(json.dumps(report))


def difference(lm: lookfar.LM, prompt: list[int], expected: list[int], got: list[int]) -> dict[str, float]:
    at = first_difference(expected, got) or 0
    return {"token": at, "margin": margin_after(lm.model, prompt + expected[:at])}


def show(report: dict[str, Any]) -> None:
    title = "{suite}: {prompts} prompts ({natural} natural), {max_new_tokens} tokens, {dtype}, {machine}".format(
        **report
    )
    table = Table(
        "strategy", "identical", "in batches", "tokens/step all", "natural", "rows/step", "speed-up", title=title
    )
    for name, r in report["strategies"].items():
        table.add_row(
            name,
            f"{r['identical']}/{report['prompts']}",
            f"{r.get('identical_in_batch', '–')}/{report['prompts']}",
            f"{r['tokens_per_step']:.2f}",
            f"{r['tokens_per_step_natural']:.2f}",
            f"{r['rows_per_step']:.1f}",
            f"{r['speed_up_over_generate']:.2f}×",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
