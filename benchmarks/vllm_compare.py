"""lookfar inside vLLM, beside vLLM's own `ngram` and `suffix`: tokens per step, and the time of a call.

    .venv-vllm/bin/python benchmarks/vllm_compare.py --data DIR

Runs in the environment that `make vllm-test` makes; `suffix` needs arctic-inference there. The demo model decodes the
first prompts of each suite greedily in float32, the prompts of a suite at once. Every method has an engine of its own.
*Cold*: the engine has not seen these prompts. *Warm*: a second pass over all of them. All outputs are compared with
those of plain decoding. Then the time of a call of the proposer in steps of 1, 16 and 64 requests. Ends with one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

# vLLM 0.32 fails to start on a CPU if its worker has imported numba before, and it imports this module: so lookfar is
# imported in functions only.
SUITES = ("mt_bench", "gsm8k", "edit_eval", "humaneval", "xsum", "dolly", "mbpp", "clapnq")
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    "lookfar": {"method": "custom_class", "model": "lookfar.integrations.vllm.Proposer"},
}
BATCHES = (1, 16, 64)


class Engine:
    """An engine of vLLM with one method of speculation."""

    def __init__(self, method: str, draft: int) -> None:
        from vllm import LLM

        from lookfar.models.demo import demo_model

        speculation = METHODS[method]
        options: dict[str, Any] = {}
        if speculation is not None:
            options["speculative_config"] = {**speculation, "num_speculative_tokens": draft}
            options["worker_extension_cls"] = "vllm_timing.TimedWorker"
        self.llm: Any = LLM(
            str(demo_model()),
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=max(BATCHES),
            enforce_eager=True,
            disable_log_stats=False,
            **options,
        )
        self.speculates = speculation is not None
        if self.speculates:
            self.llm.collective_rpc("time_calls")
            self.llm.collective_rpc("give_request_ids")

    def decode(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        done = self.llm.generate(inputs, SamplingParams(temperature=0, max_tokens=new), use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    def calls(self) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = self.llm.collective_rpc("take_calls")[0]
        return found

    def drafted(self) -> int:
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")


def read_prompts(data: Path, limit: int) -> dict[str, list[list[int]]]:
    """Return the tokens of the first prompts of each suite."""
    from transformers import AutoTokenizer

    from lookfar.bench import suites
    from lookfar.models.demo import demo_model

    tokenizer = AutoTokenizer.from_pretrained(demo_model())

    def ids(prompt: suites.Prompt) -> list[int]:
        if not prompt.chat:
            return list(tokenizer(prompt.text).input_ids)
        messages = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    return {suite: [ids(each) for each in suites.read_prompts(data / f"{suite}.jsonl", limit)] for suite in SUITES}


def measure(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one method in this process."""
    prompts = read_prompts(options.data, options.limit)
    engine = Engine(method, options.draft)
    report: dict[str, Any] = {"outputs": {}, "cells": {}, "seconds": {}, "call_us": {}}
    for kind in ("cold", "warm"):
        start = perf_counter()
        for suite, asked in prompts.items():
            drafted = engine.drafted()
            outputs = engine.decode(asked, options.max_new_tokens)
            report["outputs"][f"{suite}, {kind}"] = outputs
            if engine.speculates:
                tokens, steps = sum(map(len, outputs)), sum(rows for rows, _ in engine.calls())
                report["cells"][f"{suite}, {kind}"] = [tokens, steps, engine.drafted() - drafted]
        report["seconds"][kind] = perf_counter() - start
        if not engine.speculates:
            return report
    for batch in BATCHES:
        engine.decode(list(short_prompts(prompts, batch)), 32)
        times = [seconds for rows, seconds in engine.calls() if rows == batch]
        report["call_us"][str(batch)] = 1e6 * statistics.median(times)
    return report


def short_prompts(prompts: dict[str, list[list[int]]], count: int) -> Iterator[list[int]]:
    """Yield different prompts, which begin like those of two suites."""
    known = prompts["gsm8k"] + prompts["mt_bench"]
    for i in range(count):
        ids = known[i % len(known)]
        yield ids[: max(len(ids) - i // len(known), 8)]


def run_method(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one method in a process of its own."""
    own = str(Path(__file__).parent)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, __file__, *sys.argv[1:], "--method", method]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-5000:]}\n{method} failed.")
    report: dict[str, Any] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith('{"outputs"'))
    )
    return report


def print_report(reports: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print tables, and one JSON line."""
    plain = reports.pop("plain")["outputs"]
    table = Table("tokens (drafted) per step", *SUITES, "all", title=f"K = {options.draft}")
    cells: dict[str, dict[str, list[float]]] = {}
    for method, report in reports.items():
        for kind in ("cold", "warm"):
            found = [report["cells"][f"{suite}, {kind}"] for suite in SUITES]
            found.append([sum(column) for column in zip(*found, strict=True)])
            rates = [[tokens / steps, drafted / steps] for tokens, steps, drafted in found]
            table.add_row(f"{method}, {kind}", *(f"{rate:.2f} ({drafted:.1f})" for rate, drafted in rates))
            cells[f"{method}, {kind}"] = dict(zip((*SUITES, "all"), rates, strict=True))
    Console(width=140).print(table)
    different = {
        method: sum(
            one != other
            for cell, outputs in report["outputs"].items()
            for one, other in zip(outputs, plain[cell.replace("warm", "cold")], strict=True)
        )
        for method, report in reports.items()
    }
    calls = {method: report["call_us"] for method, report in reports.items()}
    print(json.dumps({"draft": options.draft, "cells": cells, "different_outputs": different, "call_us": calls}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the prompts")
    parser.add_argument("--limit", type=int, default=5, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=112)
    parser.add_argument("--draft", type=int, default=5, help="the most draft tokens (K)")
    parser.add_argument("--method", choices=METHODS, help="only this one, without tables")
    options = parser.parse_args()
    if options.method:
        print(json.dumps(measure(options.method, options)), flush=True)
    else:
        print_report({method: run_method(method, options) for method in METHODS}, options)


if __name__ == "__main__":
    main()
