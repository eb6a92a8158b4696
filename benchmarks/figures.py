"""Measure again what README and docs quote: run each benchmark, keep its report in docs/results, render all tables.

    python benchmarks/figures.py --data DIR                        # everything that needs no GPU (`make figures`)
    python benchmarks/figures.py --data DIR --only picture,bench   # some of it
    python benchmarks/figures.py --list                            # the names and their commands

A benchmark ends in one JSON line. It is kept as docs/results/NAME.json together with the command, the versions and the
date. Measurements that were done are kept when a later one fails. On a GPU: `python benchmarks/gpu.py --data DIR --out
docs/results/gpu.json`, and the experiments of the papers (`benchmarks/paper/`), then `python benchmarks/tables.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
OWN_FILE = {"picture", "bench"}  # these write docs/results/NAME.json themselves
THREE = "mt_bench,humaneval,gsm8k"
EVERY = "auto,auto/fresh,suffix,recycle,trie,lookahead,prompt_lookup"
SAMPLED = "--suites mt_bench,humaneval --limit 12 --workers 2 --budgets 16,64 --strategies auto"

# In the order in which they run: what the README quotes first. DIR stands for the folder of prompts.
COMMANDS = {
    "picture": "python benchmarks/picture.py",
    "side_by_side": f"python benchmarks/side_by_side.py --data DIR --suites {THREE} --limit 4",
    "bench": f"lookfar bench --suite {THREE} --data DIR --limit 10 --baselines generate,prompt_lookup "
    "--out docs/results/bench.json",
    "cpu_speed": f"python benchmarks/cpu_speed.py --data DIR --suites {THREE} --limit 20",
    "cpu_speed_random": "python benchmarks/cpu_speed.py --data DIR --suites random --limit 20",
    "cpu_speed_fresh": "python benchmarks/cpu_speed.py --data DIR --suites mt_bench,humaneval --limit 12 --fresh",
    "dropin": "python benchmarks/dropin.py --data DIR --limit 8",
    "structured": "python benchmarks/structured.py --data DIR --limit 10",
    "cpu_rows": "python benchmarks/cpu_rows.py",
    "host_cost": "python benchmarks/host_cost.py",
    "start": "python benchmarks/start.py --device cpu",
    "exactness": "python benchmarks/exactness.py --data DIR --suite mt_bench --limit 20",
    "exactness_code": "python benchmarks/exactness.py --data DIR --suite humaneval,gsm8k --limit 10 --batch 0 "
    '--strategies "none,jacobi,lookahead 5/15/15 + prompt"',
    "warm_store_gsm8k": "python benchmarks/warm_store.py --data DIR --suite gsm8k",
    "warm_store_mbpp": "python benchmarks/warm_store.py --data DIR --suite mbpp",
    "sampling_0": f"python benchmarks/tokens_per_step.py --data DIR {SAMPLED}",
    "sampling_07": f"python benchmarks/tokens_per_step.py --data DIR {SAMPLED},auto/no_noise --sampling "
    "temperature=0.7,top_k=0",
    "sampling_1": f"python benchmarks/tokens_per_step.py --data DIR {SAMPLED},auto/no_noise --sampling "
    "temperature=1.0,top_k=0",
    "tokens_per_step": f"python benchmarks/tokens_per_step.py --data DIR --limit 20 --workers 2 --strategies {EVERY}",
    "serve_compare": "python benchmarks/serve_compare.py --data DIR --each 2 --tokens 64",
}


# Rough minutes on two idle cores.
MINUTES = {
    **dict.fromkeys(("picture", "warm_store_gsm8k", "warm_store_mbpp", "start", "structured", "cpu_speed_random"), 4),
    **dict.fromkeys(("side_by_side", "cpu_speed_fresh", "cpu_rows", "host_cost", "exactness_code"), 5),
    **dict.fromkeys(("sampling_0", "sampling_07", "sampling_1"), 5),
    **dict.fromkeys(("bench", "cpu_speed", "dropin", "serve_compare"), 10),
    "exactness": 20,
    "tokens_per_step": 30,
}


def run(name: str, data: Path, gguf: Path | None) -> None:
    """Run one benchmark and keep its report."""
    words = [str(data) if word == "DIR" else word for word in shlex.split(COMMANDS[name])]
    extra = ["--gguf", str(gguf)] if gguf is not None and name == "side_by_side" else []
    words += extra
    program = [sys.executable, "-m", "lookfar", *words[1:]] if words[0] == "lookfar" else [sys.executable, *words[1:]]
    if name == "bench":
        (RESULTS / "bench.json").unlink(missing_ok=True)  # it would be resumed
    pipe = None if name in OWN_FILE else subprocess.PIPE
    paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(program, cwd=ROOT, stdout=pipe, text=True, check=True, env=environment)
    if pipe is not None:
        report = json.loads(done.stdout.strip().splitlines()[-1])
        keep(name, report, " --gguf FILE" if extra else "")


def keep(name: str, report: Any, extra: str = "") -> None:
    """Write a report to docs/results with what has to be known about it."""
    import torch
    import transformers

    about = {
        "command": COMMANDS[name] + extra,
        "measured": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(about | {"report": report}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of prompts: NAME.jsonl for each suite")
    parser.add_argument("--only", default=",".join(COMMANDS), help="names joined by commas")
    parser.add_argument("--gguf", type=Path, help="the demo model for llama.cpp in side_by_side")
    parser.add_argument("--list", action="store_true", help="print the names and commands")
    options = parser.parse_args()
    if options.list:
        for name, command in COMMANDS.items():
            print(f"{name:18}{MINUTES[name]:4} min  {command}")
        return
    names = options.only.split(",")
    if unknown := set(names) - set(COMMANDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; --list shows the names")
    if options.data is None or not options.data.is_dir():
        parser.error("--data has to be a folder of prompts: NAME.jsonl for each suite")
    failed = []
    for name in names:
        print(f"{name}: {COMMANDS[name]}", file=sys.stderr, flush=True)
        try:
            run(name, options.data.resolve(), options.gguf)
        except (subprocess.CalledProcessError, ValueError, IndexError) as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    subprocess.run([sys.executable, "benchmarks/tables.py"], cwd=ROOT, check=True)
    if failed:
        sys.exit(f"These failed and keep their earlier figures: {', '.join(failed)}")


if __name__ == "__main__":
    main()
