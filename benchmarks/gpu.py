"""All measurements on a GPU in one run: steps, attention, speed, batches, exactness, the server, cold starts.

    python benchmarks/gpu.py --data DIR --out results.json

Every section prints its rows and writes them to the file. Most use one model, which is warmed up first. Baselines run
in the same process as what is compared with them. `--only steps,speed` runs some sections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from cells import SUITES, all_texts, cells as measure_cells
from prompts import generate, read_prompts
from start import measure as measure_starts

import lookfar
from lookfar.bench.differences import margin_after
from lookfar.bench.methods import cut, left_padded
from lookfar.bench.steps import random_model
from lookfar.core.cache_dir import cache_dir
from lookfar.core.ids import first_difference
from lookfar.core.plan import StepPlan
from lookfar.engine.costs import tree_plan
from lookfar.engine.stats import add_up, is_natural
from lookfar.kernels.attention import attend
from lookfar.kernels.gemv import gemv
from lookfar.kernels.row_table import WIDTH, RowTable, max_tiles, step_arrays
from lookfar.kvcache.slots import SlotKVCache
from lookfar.lm import Completion
from lookfar.models.binding import BoundModel
from lookfar.models.masks import LayerKind, StepMasks
from lookfar.models.self_check import one_slot, taken_slots
from lookfar.runners.cuda_graph import runner as graph_runner
from lookfar.runners.cuda_graph.runner import CudaGraphRunner

Tokens = list[list[int]]
MOST = 64  # requests at once
options: argparse.Namespace
results: dict[str, list[dict[str, Any]]] = {}  # of each section
section = ""  # the one that is running


def report(**values: Any) -> None:
    results[section].append(values)
    options.out.write_text(json.dumps(results, indent=1))
    shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    print(f"{section:10s}", " · ".join(shown), flush=True)


def demo(**arguments: Any) -> lookfar.LM:
    return lookfar.load("demo", device="cuda", **{"dtype": "bfloat16", "max_batch": 1} | arguments)


@cache
def warm_demo() -> lookfar.LM:
    """Return the demo model, compiled, with everything captured that up to 64 requests use."""
    lm = demo(compile=True, max_batch=MOST)
    lm.warmup(requests=MOST, sampling=True)
    return lm


def prompts(lm: lookfar.LM, each: int, suites: Seq[str] = ("mt_bench", "humaneval")) -> list[list[int]]:
    """Return the first prompts of each suite."""
    return [prompt for suite in suites for prompt in read_prompts(lm, options.data / f"{suite}.jsonl", each)]


def plan_of(rows: int, context: int) -> StepPlan:
    return tree_plan(rows, context, vocab_size=1000)


def device_ms(run: Callable[[], Any], times: int = 30) -> float:
    """Return the median time of the device."""
    measured = []
    for _ in range(times + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end))
    return median(measured[5:])


def steps() -> None:
    """Milliseconds of a step, and of the device alone, for random weights of the shape of Llama-3-8B."""
    bound = BoundModel(random_model("llama-3-8b", torch.device("cuda"), torch.bfloat16))
    for compiled in (True, False):
        runner = CudaGraphRunner(bound, compile=compiled)
        assert not runner.why_unavailable()
        cache = one_slot(4096)
        for context in (512, 2048):
            found = {rows: step_ms(runner, cache, rows, context) for rows in (1, 16, 64)}
            report(mode=runner.name, context=context, rows_64_over_1=found[64] / found[1])
        if compiled:
            cache = taken_slots(32, 1024)
            found = {rows: step_ms(runner, cache, rows, 512) for rows in (1, 8)}
            report(mode=runner.name, context=512, requests=32, rows_256_over_32=found[8] / found[1])
        runner._drop_graphs()


def step_ms(runner: CudaGraphRunner, cache: SlotKVCache, rows: int, context: int) -> float:
    """Report and return the milliseconds of a step of so many rows for each slot of the cache."""
    each = [tree_plan(rows, context, 1000, handle).requests[0] for handle in range(cache.slots)]
    plan = StepPlan(each, 0 if rows == 1 else 8)
    began = perf_counter()
    runner.launch(plan, cache).result()
    to_capture = perf_counter() - began
    walls = []
    for _ in range(30):
        began = perf_counter()
        runner.launch(plan, cache).result()
        walls.append(1e3 * (perf_counter() - began))
    shape = graph_runner._shape_of(graph_runner.SIZE_OF[rows * plan.batch], plan.batch, cache, plan.top_k)
    step, _, _ = runner._step_for(shape, cache, shared=False)
    assert step is not None
    report(
        mode=runner.name,
        context=context,
        requests=plan.batch,
        rows=rows,
        ms=median(walls),
        device_ms=device_ms(step._graphs[plan.top_k].replay),
        seconds_to_capture=to_capture,
    )
    return median(walls)


def attention() -> None:
    """Microseconds of attention: ours, and torch's with a mask, as transformers calls it and without its copies."""
    for heads, kv_heads, dim, context in ((32, 8, 128, 8192), (32, 8, 128, 2048), (32, 8, 128, 512), (9, 3, 64, 300)):
        for rows in (64, 1):
            attention_of(heads, kv_heads, dim, context, rows)


def attention_of(heads: int, kv_heads: int, dim: int, context: int, rows: int) -> None:
    plan, positions = plan_of(rows, context), context + rows + 64
    inputs = np.zeros((4, rows), np.int64)
    tables = np.zeros((1, rows + max_tiles(rows, 1), WIDTH), np.int32)
    RowTable(step_arrays(inputs, tables, [(0, 0)]), positions - 1).fill(plan, [0])
    on_device = torch.from_numpy(tables)[:, None].cuda()
    q = torch.randn(1, heads, rows, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, kv_heads, positions, dim, device="cuda", dtype=torch.bfloat16)
    mask = StepMasks(plan, context + rows, torch.device("cuda")).of(LayerKind())

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None, : context + rows].expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2)

    own_k, own_v = repeated(k).contiguous(), repeated(v).contiguous()
    microseconds = {}
    for name, run in {
        "ours": lambda: attend(q, k, v, on_device, None, dim**-0.5, 0.0),
        "sdpa": lambda: F.scaled_dot_product_attention(q, own_k, own_v, attn_mask=mask),
        "sdpa_and_repeat": lambda: F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask),
    }.items():
        microseconds[name] = in_a_graph([run] * 20)
    ratio = microseconds["ours"] / microseconds["sdpa"]
    report(heads=f"{heads}/{kv_heads}x{dim}", context=context, rows=rows, **microseconds, ratio=ratio)


def products() -> None:
    """Microseconds of one row times the matrices of an 8B layer and its head: ours, and cuBLAS."""
    for matrix, inputs, outputs in (
        ("queries, keys, values", 4096, 6144),
        ("attention's output", 4096, 4096),
        ("gate and up", 4096, 28672),
        ("down", 14336, 4096),
        ("head", 4096, 128256),
    ):
        # More weights than the device's cache holds, as in a model.
        weights = torch.randn(-(-(300 << 20) // (2 * inputs * outputs)), outputs, inputs, device="cuda").bfloat16()
        x = torch.randn(1, inputs, device="cuda").bfloat16()
        found = {
            name: in_a_graph([partial(multiply, x, weight, None) for weight in weights])
            for name, multiply in {"ours": gemv, "cublas": F.linear}.items()
        }
        report(matrix=matrix, inputs=inputs, outputs=outputs, **found, ratio=found["ours"] / found["cublas"])


def in_a_graph(runs: Seq[Callable[[], Any]]) -> float:
    """Return the microseconds of each, one after the other, without the host's time."""
    for run in runs:
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return 1e3 * device_ms(graph.replay, 20) / len(runs)


def run_all(lm: lookfar.LM, texts: list[list[int]], new: int, **arguments: Any) -> list[Completion]:
    lm.forget()
    return [lm.generate(text, max_new_tokens=new, **arguments) for text in texts]


def rate(done: list[Completion], which: list[bool] | None = None) -> float:
    chosen = [one for i, one in enumerate(done) if which is None or which[i]]
    return sum(len(one.token_ids) for one in chosen) / sum(one.stats.seconds for one in chosen)


def speed() -> None:
    """Tokens per second on real prompts: transformers, its prompt lookup, ours without speculation and with it."""
    lm = demo()
    texts = prompts(lm, 20)
    for name, arguments in {"model.generate": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}}.items():
        generate(lm, texts[0], 8, do_sample=False, **arguments)
        runs = [generate(lm, text, 128, do_sample=False, **arguments) for text in (texts[0], texts[20])]
        report(mode=name, tokens_per_second=sum(len(t) for t, _ in runs) / sum(s for _, s in runs))
    every, some = texts, texts[:4] + texts[20:24]
    for compiled, texts in ((True, every), (False, some)):
        lm = warm_demo() if compiled else demo()
        for strategy in ("none", "auto"):  # captures the steps, those for prefills included
            run_all(lm, texts, 4, strategy=strategy)
            run_all(lm, [every[0], every[-1]], 256, strategy=strategy)
        rounds = [{s: run_all(lm, texts, 256, strategy=s) for s in ("none", "auto")} for _ in range(2)]
        natural = [is_natural(one.token_ids) for one in rounds[0]["none"]]
        mode = lm.engine.runner.name
        for strategy in ("none", "auto"):
            total = add_up(one.stats for one in rounds[0][strategy])
            part = add_up(one.stats for one, is_one in zip(rounds[0][strategy], natural, strict=True) if is_one)
            report(
                mode=f"{mode} {strategy}",
                tokens_per_second=median(rate(r[strategy]) for r in rounds),
                natural_tokens_per_second=median(rate(r[strategy], natural) for r in rounds),
                tokens_per_step=total.tokens_per_step,
                natural_tokens_per_step=part.tokens_per_step,
                rows_per_step=total.rows_per_step,
                host_microseconds=1e6 * total.host_seconds / total.steps,
            )
        report(
            mode=f"{mode}, auto over none",
            all=median(rate(r["auto"]) / rate(r["none"]) for r in rounds),
            natural=median(rate(r["auto"], natural) / rate(r["none"], natural) for r in rounds),
            natural_outputs=sum(natural),
            outputs=len(natural),
            graph_mib=lm.engine.runner.graph_bytes / 2**20,
            cache_mib=lm.engine.cache.nbytes / 2**20,
        )
        differences(lm, f"{mode}, none / auto", texts, tokens_of(rounds[0]["none"]), tokens_of(rounds[0]["auto"]))
        if compiled:
            done = run_all(lm, texts[::4], 256, budget=64)
            host = median(1e6 * one.stats.host_seconds / one.stats.steps for one in done)
            rows = add_up(one.stats for one in done).rows_per_step
            report(mode="64 rows a step", host_microseconds=host, rows_per_step=rows)


def sampled() -> None:
    """Tokens per second of sampling in CUDA graphs and on the host."""
    lm = warm_demo()
    texts = prompts(lm, 4)
    runner = lm.engine.runner
    usual = runner.sampled_bytes
    for sampling in (
        {"temperature": 0.7, "top_k": 0},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 0.7, "top_p": 0.9},
    ):
        for strategy in ("none", "auto"):
            seconds: dict[str, list[float]] = {"graphs": [], "host": []}
            for _ in range(3):
                for place in seconds:
                    runner.sampled_bytes = usual if place == "graphs" else 0
                    done = run_all(lm, texts, 128, strategy=strategy, do_sample=True, seed=1, **sampling)
                    if place == "graphs":  # the first run captures
                        done = run_all(lm, texts, 128, strategy=strategy, do_sample=True, seed=1, **sampling)
                    seconds[place].append(1 / rate(done))
            runner.sampled_bytes = usual
            rates = {place: 1 / median(times) for place, times in seconds.items()}
            report(sampling=sampling, strategy=strategy, **rates, ratio=rates["graphs"] / rates["host"])


def differences(
    lm: lookfar.LM, what: str, texts: list[list[int]], one: list[list[int]], other: list[list[int]]
) -> None:
    """Report how many outputs differ, and how close the two best logits are at the first difference."""
    margins = []
    for text, a, b in zip(texts, one, other, strict=True):
        at = first_difference(a, b)
        if at is not None:
            margins.append(margin_after(lm.model, text + a[:at]))
    report(
        what=what,
        outputs=len(one),
        differ=len(margins),
        per_10000_tokens=1e4 * len(margins) / sum(map(len, one)),
        median_margin=median(margins) if margins else None,
        largest_margin=max(margins, default=None),
    )


def tokens_of(done: list[Completion]) -> list[list[int]]:
    return [one.token_ids for one in done]


def alone_and_in_a_batch() -> None:
    """How often outputs of `model.generate` itself, alone and in a batch of eight, differ in bfloat16."""
    lm, new = demo(cuda_graphs=False), 64
    texts = sorted(prompts(lm, 8), key=len)
    alone = [generate(lm, text, new)[0] for text in texts]
    together: list[list[int]] = []
    for start in range(0, len(texts), 8):
        ids, mask = left_padded(texts[start : start + 8], lm.device)
        out = lm.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        together += [cut(row, lm) for row in out[:, ids.shape[1] :].tolist()]
    differences(lm, "model.generate alone / in batches of 8", texts, alone, together)


def cells() -> None:
    """`auto` over none for 1, 8, 32 and 64 requests at once (benchmarks/cells.py)."""
    lm = warm_demo()
    sizes = ((1, False), (8, False), (8, True), (32, False), (32, True), (64, False), (64, True))
    for row in measure_cells(lm, all_texts(lm, options.data, 43, 256), sizes):
        report(**row)
    lm.engine.scheduler.max_batch = MOST


def budgets() -> None:
    """One request with an automatic budget and with fixed ones: from an empty cache directory, in a second process."""
    with TemporaryDirectory() as folder:
        for which in ("empty cache", "second process"):
            caches = {name: f"{folder}/{name}" for name in ("LOOKFAR_CACHE", "TRITON_CACHE_DIR")}
            Path(caches["LOOKFAR_CACHE"]).mkdir(exist_ok=True)
            for kept in cache_dir().glob("SmolLM2*"):  # the model itself is there already
                if not (own := Path(caches["LOOKFAR_CACHE"], kept.name)).exists():
                    own.symlink_to(kept)
            out = Path(folder, "budgets.json")
            command = [
                sys.executable,
                __file__,
                *("--data", str(options.data), "--each", str(options.each)),
                *("--only", "budgets_here", "--out", str(out)),
            ]
            subprocess.run(command, env=os.environ | caches, check=True)
            for row in json.loads(out.read_text())["budgets_here"]:
                report(cache=which, **row)


def budgets_here() -> None:
    """The same in this process, methods in turn and twice; `auto` begins, with nothing known."""
    lm = demo(compile=True)
    lm.warmup()
    texts = prompts(lm, options.each, SUITES)
    ways: dict[str, dict[str, Any]] = {"auto": {"strategy": "auto"}, "none": {"strategy": "none"}}
    ways |= {str(rows): {"budget": rows} for rows in (8, 16, 32, 64, 128)}
    rounds = [{name: run_all(lm, texts, 256, **how) for name, how in ways.items()} for _ in range(2)]
    natural = [is_natural(one.token_ids) for one in rounds[0]["none"]]
    first = {name: rate(done) for name, done in rounds[0].items()}
    rates = {name: median(rate(one[name]) for one in rounds) for name in ways}
    some = {name: median(rate(one[name], natural) for one in rounds) for name in ways}
    best = max(list(ways)[2:], key=lambda name: rates[name])
    for name in ways:
        total = add_up(one.stats for one in rounds[-1][name])
        pairs = zip(rounds[0]["none"], rounds[-1][name], strict=True)
        report(
            budget=name,
            tokens_per_second=rates[name],
            natural_tokens_per_second=some[name],
            over_none=rates[name] / rates["none"],
            natural_over_none=some[name] / some["none"],
            tokens_per_step=total.tokens_per_step,
            rows_per_step=total.rows_per_step,
            host_microseconds=1e6 * total.host_seconds / total.steps,
            different=sum(a.token_ids != b.token_ids for a, b in pairs),
        )
    report(budget="auto over best", best=best, ratio=rates["auto"] / rates[best], first=first["auto"] / first[best])


def at_once(lm: lookfar.LM, texts: list[list[int]], size: int, **arguments: Any) -> Tokens:
    """Decode texts as requests of their own, `size` at a time, each with a seed of its own if it is sampled."""
    lm.forget()

    def decode(number: int) -> list[int]:
        seeded = {"seed": number} if arguments.get("do_sample") else {}
        return lm.generate(texts[number], max_new_tokens=256, **seeded, **arguments).token_ids

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(decode, range(len(texts))))


def exact() -> None:
    """bfloat16: outputs that differ from plain decoding alone, with drafts and in batches, greedy and sampled."""
    modes = {"greedy": {}, "temperature 0.9": {"do_sample": True, "temperature": 0.9, "top_k": 0}}
    plain: dict[str, Tokens] = {}
    lm = warm_demo()
    texts = prompts(lm, options.each, SUITES)
    for size in (1, 8, 32):
        for name, sampling in modes.items():
            for strategy in ("none", "auto"):
                found = at_once(lm, texts, size, strategy=strategy, **sampling)
                expected = plain.setdefault(name, found)
                if found is not expected:
                    what = f"{name}, none alone / {strategy} in batches of {size}"
                    differences(lm, what, texts, expected, found)


def exact_cost() -> None:
    """Tokens per second of the default mode and with `exact=False`, alternately."""
    lms = {"exact": warm_demo(), "exact=False": demo(compile=True, exact=False, max_batch=MOST)}
    texts = prompts(lms["exact"], 7, SUITES)
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(3):
        for strategy in ("none", "auto"):
            for mode, lm in lms.items():
                done = run_all(lm, texts, 256 if turn else 64, strategy=strategy)
                if turn:  # the first one captures
                    rates.setdefault((strategy, mode), []).append(rate(done))
    for strategy in ("none", "auto"):
        usual, other = (median(rates[strategy, mode]) for mode in lms)
        report(strategy=strategy, exact=usual, not_exact=other, cost=other / usual - 1)


def same_as_generate() -> None:
    """float32: outputs that differ from those of `model.generate`, greedy and sampled."""
    lm, new = demo(dtype="float32", max_batch=4), 24
    texts = prompts(lm, 4)
    for name, arguments in {
        "greedy": {},
        "temperature 0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
        "temperature 1, top_p 0.9": {"do_sample": True, "temperature": 1.0, "top_p": 0.9},
    }.items():
        wrong = 0
        for seed, text in enumerate(texts):
            expected, _ = generate(lm, text, new, seed, **arguments)
            for strategy in ("none", "auto"):
                seeded = {"seed": seed} if arguments else {}
                done = lm.generate(text, max_new_tokens=new, strategy=strategy, **seeded, **arguments)
                wrong += done.token_ids != expected
        report(what=name, outputs=2 * len(texts), differ=wrong)
    expected_all = [generate(lm, text, new)[0] for text in texts]
    together = lm.generate(texts, max_new_tokens=new)
    differ = sum(a.token_ids != b for a, b in zip(together, expected_all, strict=True))
    report(what="greedy, batches of 4", outputs=len(texts), differ=differ)


def serve() -> None:
    """The server: throughput and latency of 1 to 64 clients (benchmarks/serve_gpu.py)."""
    from serve_gpu import measure as measure_server, server_options

    lm = warm_demo()
    lm.driver.works_when_idle = True
    try:
        for row in asyncio.run(measure_server(lm, server_options(["--data", str(options.data), "--repeats", "2"]))):
            report(**row)
    finally:
        lm.driver.works_when_idle = False


def machine() -> None:
    report(gpu=torch.cuda.get_device_name(), torch=torch.__version__, transformers=transformers.__version__)


def start() -> None:
    """Seconds to the first token and until full speed, in processes of their own (benchmarks/start.py)."""
    for compiled in (True, False):
        for result in measure_starts("cuda", compiled, "bfloat16"):
            report(**result)


SECTIONS = {
    "machine": machine,
    "float32": same_as_generate,
    "attention": attention,
    "products": products,
    "steps": steps,
    "speed": speed,
    "sampled": sampled,
    "cells": cells,
    "budgets": budgets,
    "exact": exact,
    "exact_cost": exact_cost,
    "alone": alone_and_in_a_batch,
    "serve": serve,
    "start": start,
    "budgets_here": budgets_here,  # called by `budgets`
}


def main() -> None:
    global options, section
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default=",".join(list(SECTIONS)[1:-1]))
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--each", type=int, default=20, help="prompts of each suite in budgets and exact")
    options = parser.parse_args()
    if options.out.exists():  # other sections are kept
        results.update(json.loads(options.out.read_text()))
    for section in ("machine", *options.only.split(",")):
        began, results[section] = perf_counter(), []
        try:
            SECTIONS[section]()
        except Exception:  # go on with the other sections
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{section} took {perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
