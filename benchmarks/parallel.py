"""Lookahead parallelism on this machine: tokens per step, rows of the busiest rank, and bytes exchanged per step.

    python benchmarks/parallel.py --data DIR --ranks 1,2,3 --budgets 8,16,32

Runs the demo model on one or more gloo processes of one thread each, with several row budgets (those of a whole step),
with a lookahead window, and with sampling. Greedy tokens have to be the same on any number of ranks. `rows_per_rank` is
the mean number of rows of the rank with the most, tokens that are fed again included: a rank costs what its rows cost,
so compare equal numbers of rows per rank. Times mean something only if every rank has a core of its own. Prints one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

SAMPLED = {"temperature": 0.8, "seed": 0}


def work(options: argparse.Namespace) -> None:
    """Decode with every setting, as one rank; rank 0 prints the records."""
    from prompts import read_prompts

    from lookfar import Lookahead, parallel

    lm = parallel.load("demo", device="cpu", strategy="auto")
    prompts = [
        ids
        for suite in options.suites.split(",")
        for ids in read_prompts(lm, options.data / f"{suite}.jsonl", options.limit)
    ]
    settings: list[dict[str, Any]] = [{"budget": int(budget)} for budget in options.budgets.split(",")]
    settings += [{"budget": "auto"}, {"budget": 16, **SAMPLED}]
    settings.append({"strategy": Lookahead(10, 5, 10), "budget": None})
    for setting in settings:
        lm.forget()
        lm.generate(prompts[0], max_new_tokens=8, **setting)  # measures the cost of rows, where they are needed
        print(json.dumps(measure(lm, prompts, options.new, setting)), flush=True)


def measure(lm: Any, prompts: list[list[int]], new: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Decode all prompts, one after the other."""
    from lookfar.engine.stats import add_up
    from lookfar.parallel.runner import ParallelRunner, StepCounts

    runner = lm.engine.runner
    if isinstance(runner, ParallelRunner):
        runner.counts = StepCounts()
    done = [lm.generate(prompt, max_new_tokens=new, **setting) for prompt in prompts]
    stats = add_up([one.stats for one in done])
    found: dict[str, Any] = {
        "setting": {key: str(value) for key, value in setting.items()},
        "tokens_per_step": stats.tokens_per_step,
        "rows_per_step": stats.rows_per_step,
        "rows_per_rank": stats.rows_per_step,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_second_median": median(one.stats.tokens_per_second for one in done),
        "token_ids": [one.token_ids for one in done],
    }
    if isinstance(runner, ParallelRunner):
        counts = runner.counts
        found["rows_per_rank"] = counts.rows / counts.steps
        found["replayed_rows_per_step"] = sum(one.stats.replayed_rows for one in done) / counts.steps
        found["bytes_per_step"] = counts.bytes / counts.steps
        found["fetched_bytes_per_step"] = counts.fetched / counts.steps
    return found


def run(ranks: int, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Start this program as so many ranks and yield the records of rank 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in map(str, range(ranks)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work", *arguments]
        processes.append(
            subprocess.Popen(command, env={**os.environ, **common, **own}, stdout=subprocess.PIPE, text=True)
        )
    assert processes[0].stdout is not None
    yield from map(json.loads, processes[0].stdout)
    if any(process.wait() for process in processes):
        raise SystemExit("A rank has failed.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory of the prompt files")
    parser.add_argument("--suites", default="mt_bench,humaneval")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each suite")
    parser.add_argument("--new", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--budgets", default="8,16,24,32,48")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    expected: dict[str, Any] = {}
    for ranks in options.ranks.split(","):
        found[ranks] = []
        for record in run(int(ranks), sys.argv[1:]):
            found[ranks].append(record)
            tokens = record.pop("token_ids")
            kind = "sampled" if "seed" in record["setting"] else "greedy"
            record["same_tokens"] = tokens == expected.setdefault(kind, tokens)
            print(ranks, json.dumps(record), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "parallel", "threads": 1, "suites": options.suites, "ranks": found}))


if __name__ == "__main__":
    main()
