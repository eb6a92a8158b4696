"""`lookfar compare`: one prompt, decoded by transformers, without speculation and with a strategy, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from lookfar.cli import options
from lookfar.core.progress import progress_bar

if TYPE_CHECKING:
    from lookfar.drafters.base import Strategy
    from lookfar.lm import LM
    from lookfar.streams import Completion

Repeats = Annotated[int, typer.Option(min=1, help="Decode this often with each; times are medians.")]
Generate = Annotated[bool, typer.Option(help="Also decode with transformers' own generate.")]


def compare(
    prompt: options.Prompt,
    model: options.Model = "demo",
    strategy: options.StrategyName = None,
    settings: options.Settings = None,
    budget: options.Budget = None,
    store: options.StoreFile = None,
    pack: options.Pack = None,
    compile: options.Compile = False,
    exact: options.Exact = None,
    max_new_tokens: options.MaxNewTokens = 128,
    max_length: options.MaxLength = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = 0,
    repeats: Repeats = 1,
    generate: Generate = True,
    raw: options.Raw = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Decode PROMPT with transformers, without speculation and with a strategy: how fast, and is it the same text?"""
    options.prepare()
    from lookfar.drafters.registry import name_of

    chosen, rows = options.strategies(strategy, settings), options.rows(budget)
    sampling = options.sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    lm = options.load_model(model, options.ModelOptions(device, dtype, max_length, store, pack, compile, exact))
    ids, _ = options.prompt_ids(lm, prompt, raw)
    options.speculate(lm, chosen, None)
    strategies = lm.strategy
    asked = {"max_new_tokens": max_new_tokens, "budget": rows, **sampling}
    runs = _decode(lm, ids, strategies, asked, repeats, store)
    record = _record(lm, ids, runs, strategies)
    if generate and not lm.engine.runner.model.support.encoder_decoder:
        record["generate"] = _generate(lm, ids, asked, repeats)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        _show(lm, record, runs["none"][0], runs["strategy"][0], name_of(strategies))


def _decode(
    lm: LM, ids: list[int], strategies: tuple[Strategy, ...], asked: dict[str, Any], repeats: int, store: Path | None
) -> dict[str, list[Completion]]:
    """Decode a prompt with both methods in turn, after a warm-up; each run starts with nothing but the given store."""
    from lookfar.drafters.registry import name_of

    methods: dict[str, tuple[Strategy, ...]] = {"none": (), "strategy": strategies}
    runs: dict[str, list[Completion]] = {side: [] for side in methods}
    new = asked["max_new_tokens"]
    # The first forward passes of a process are slow, and CUDA graphs are captured when their size is first needed.
    lm.warmup(requests=1, length=len(ids) + new, sampling=bool(asked.get("temperature")), prior=False)
    first = new if lm.engine.runner.limits.captured else min(4, new)
    for method in methods.values():
        with progress_bar("Decoding a few tokens"):
            lm.generate(ids, strategy=method, **(asked | {"max_new_tokens": first}))
    for _ in range(repeats):
        for side, method in methods.items():
            lm.forget()
            if store is not None:
                lm.store.load(store)
            with progress_bar(f"Decoding with {name_of(method)}", new) as advance:
                done = lm.generate(ids, strategy=method, on_step=lambda output: advance(len(output.tokens)), **asked)
            runs[side].append(done)
    return runs


def _generate(lm: LM, ids: list[int], asked: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Decode a prompt with transformers' own `generate`."""
    from lookfar.bench.methods import Method
    from lookfar.sampling.params import SAMPLING_ARGUMENTS

    sampling = {name: value for name, value in asked.items() if name not in ("max_new_tokens", "budget", "seed")}
    sampling["do_sample"] = any(name in sampling for name in SAMPLING_ARGUMENTS)
    method, new, seed = Method("hf generate"), asked["max_new_tokens"], asked["seed"]
    with progress_bar("Decoding with model.generate"):
        method.run(lm, [ids], min(4, new), seed, sampling)
        runs = [method.run(lm, [ids], new, seed, sampling) for _ in range(repeats)]
    seconds, tokens = median(run.seconds for run in runs), runs[0].outputs[0]
    stats = {"tokens": len(tokens), "seconds": seconds, "tokens_per_second": len(tokens) / seconds}
    return {"token_ids": tokens, "stats": stats}


def _record(
    lm: LM, ids: list[int], runs: dict[str, list[Completion]], strategies: tuple[Strategy, ...]
) -> dict[str, Any]:
    from lookfar.drafters.registry import name_of

    seconds = {side: median(done.stats.seconds for done in completions) for side, completions in runs.items()}
    base, fast = runs["none"][0], runs["strategy"][0]
    every = [done for completions in runs.values() for done in completions]
    other = next((done for done in every if done.token_ids != base.token_ids), None)
    return {
        "identical": other is None,
        "speed_up": seconds["none"] / seconds["strategy"],
        "first_difference": None if other is None else _difference(lm, ids, base.token_ids, other.token_ids),
        "none": _as_record(base, seconds["none"]),
        "strategy": {"name": name_of(strategies), "settings": [repr(one) for one in strategies]}
        | _as_record(fast, seconds["strategy"]),
    }


def _as_record(done: Completion, seconds: float) -> dict[str, Any]:
    stats = done.stats.as_dict() | {"seconds": seconds, "tokens_per_second": done.stats.tokens / seconds}
    return {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason, "stats": stats}


def _difference(lm: LM, prompt: list[int], base: list[int], other: list[int]) -> dict[str, float]:
    from lookfar.bench.differences import margin_after
    from lookfar.core.ids import first_difference

    at = first_difference(base, other) or 0
    return {"token": at, "margin": margin_after(lm.model, prompt + base[:at])}


def _show(lm: LM, record: dict[str, Any], base: Completion, fast: Completion, name: str) -> None:
    from lookfar.cli.colours import coloured

    out = Console(highlight=False)
    for title, done in (("no speculation", base), (name, fast)):
        text = coloured(lm.tokenizer, done.token_ids, done.stats.step_sizes)
        out.print(Panel(text, title=f"{title}: one colour per step", title_align="left"))
    sides = ["none", "strategy"]
    columns = ["no speculation", name]
    if "generate" in record:
        sides, columns = ["generate", *sides], ["model.generate", *columns]
    table = Table("", *columns, box=None, header_style="bold")
    for label, key, form in (
        ("tokens", "tokens", "d"),
        ("steps", "steps", "d"),
        ("tokens per step", "tokens_per_step", ".2f"),
        ("rows per step", "rows_per_step", ".1f"),
        ("seconds", "seconds", ".2f"),
        ("tokens per second", "tokens_per_second", ".1f"),
    ):
        known = [record[side]["stats"].get(key) for side in sides]
        table.add_row(label, *("" if value is None else format(value, form) for value in known))
    out.print(table)
    if record["identical"]:
        speeds = f"{record['speed_up']:.2f}× the speed without speculation"
        if "generate" in record:
            ratio = record["strategy"]["stats"]["tokens_per_second"] / record["generate"]["stats"]["tokens_per_second"]
            speeds = f"{ratio:.2f}× the speed of model.generate and {speeds}"
        out.print(f"[bold green]Identical[/]: the same {len(base.token_ids)} tokens, {speeds}.")
    else:
        where = record["first_difference"]
        out.print(f"[bold red]Different[/] from token {where['token']} on, {record['speed_up']:.2f}× the speed.")
        out.print(
            f"The two highest logits there are {where['margin']:.4f} apart: in half precision a near-tie can flip with "
            "the number of rows; run with --dtype float32, or on a GPU without --no-exact, to rule out other causes."
        )
