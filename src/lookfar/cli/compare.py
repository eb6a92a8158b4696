"""`lookfar compare`: one prompt, decoded plainly and with a strategy, side by side."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from lookfar.cli import options
from lookfar.progress import bar

if TYPE_CHECKING:
    from lookfar.lm import LM, Completion

Repeats = Annotated[int, typer.Option(min=1, help="Decode this often with each, in turn; times are medians.")]


def compare(
    prompt: options.Prompt,
    model: options.Model = "demo",
    strategy: options.StrategyName = None,
    settings: options.Settings = None,
    budget: options.Budget = None,
    store: options.StoreFile = None,
    pack: options.Pack = None,
    compile: options.Compile = False,
    exact: options.Exact = False,
    max_new_tokens: options.MaxNewTokens = 128,
    max_length: options.MaxLength = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = 0,
    repeats: Repeats = 1,
    raw: options.Raw = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Decode PROMPT plainly and with a strategy: are the texts identical, and which was faster?"""
    from lookfar.config import name_of

    chosen, rows = options.strategies(strategy, settings), options.rows(budget)
    sampling = options.sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    lm = options.load_model(model, device, dtype, max_length, store, pack, compile, exact)
    ids, _ = options.prompt_ids(lm, prompt, raw)
    contestants = {"plain": (), "strategy": lm.strategy if chosen is None else chosen}
    name = name_of(contestants["strategy"])
    runs: dict[str, list[Completion]] = {side: [] for side in contestants}
    # The first forward passes of a process are slow; they should not count against whoever comes first. Captured steps
    # are made when their number of rows is first needed, so there the whole text is decoded once.
    first = max_new_tokens if lm.engine.steps.room.packed else min(4, max_new_tokens)
    for plan in contestants.values():
        lm.generate(ids, max_new_tokens=first, strategy=plan, budget=rows, **sampling)
    for _ in range(repeats):
        for side, plan in contestants.items():
            lm.forget()  # the answer itself must not be what the next one is guessed from
            if store is not None:
                lm.store.load(store)
            with bar(f"Decoding {'plainly' if side == 'plain' else 'with ' + name}", max_new_tokens) as advance:
                runs[side].append(
                    lm.generate(
                        ids,
                        max_new_tokens=max_new_tokens,
                        strategy=plan,
                        budget=rows,
                        on_tokens=lambda _, n: advance(len(n)),
                        **sampling,
                    )
                )
    seconds = {side: median(done.stats.seconds for done in dones) for side, dones in runs.items()}
    plain, fast = runs["plain"][0], runs["strategy"][0]
    others = (done for dones in runs.values() for done in dones if done.token_ids != plain.token_ids)
    other = next(others, None)
    record = {
        "identical": other is None,
        "speed_up": seconds["plain"] / seconds["strategy"],
        "first_difference": None if other is None else _difference(lm, ids, plain.token_ids, other.token_ids),
        "plain": _as_record(plain, seconds["plain"]),
        "strategy": {"name": name, "settings": [repr(one) for one in contestants["strategy"]]}
        | _as_record(fast, seconds["strategy"]),
    }
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        _show(lm, record, plain, fast, name)


def _as_record(done: Completion, seconds: float) -> dict[str, Any]:
    stats = done.stats.as_dict() | {"seconds": seconds, "tokens_per_second": done.stats.tokens / seconds}
    return {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason, "stats": stats}


def _difference(lm: LM, prompt: list[int], plain: list[int], other: list[int]) -> dict[str, float]:
    from lookfar.choose import first_difference, margin_after

    at = first_difference(plain, other) or 0
    return {"token": at, "margin": margin_after(lm.model, prompt + plain[:at])}


def _show(lm: LM, record: dict[str, Any], plain: Completion, fast: Completion, name: str) -> None:
    from lookfar.cli.steps import coloured

    out = Console(highlight=False)
    for title, done in (("plain decoding", plain), (name, fast)):
        text = coloured(lm.tokenizer, done.token_ids, done.stats.step_sizes)
        out.print(Panel(text, title=f"{title}: a colour is a step", title_align="left"))
    table = Table("", "plain", name, box=None, header_style="bold")
    for label, key, form in (
        ("tokens", "tokens", "d"),
        ("steps", "steps", "d"),
        ("tokens per step", "tokens_per_step", ".2f"),
        ("rows per step", "rows_per_step", ".1f"),
        ("seconds", "seconds", ".2f"),
        ("tokens per second", "tokens_per_second", ".1f"),
    ):
        table.add_row(label, *(format(record[side]["stats"][key], form) for side in ("plain", "strategy")))
    out.print(table)
    if record["identical"]:
        out.print(
            f"[bold green]Identical[/]: the same {len(plain.token_ids)} tokens, {record['speed_up']:.2f}× the speed."
        )
    else:
        where = record["first_difference"]
        out.print(f"[bold red]Different[/] from token {where['token']} on, {record['speed_up']:.2f}× the speed.")
        out.print(
            f"The two best logits there are {where['margin']:.4f} apart: in half precision a near-tie can "
            "flip with the number of rows; run with --dtype float32, or on a GPU with --exact, to see that it is "
            "nothing else."
        )
