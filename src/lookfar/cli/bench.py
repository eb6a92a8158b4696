"""`lookfar bench`: how much faster, on this machine, with every number written down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lookfar.cli import options
from lookfar.errors import ConfigError

Suites = Annotated[
    str | None,
    typer.Option(
        "--suite",
        help="mt_bench, humaneval, gsm8k, mbpp, classeval, xsum, cnn_dailymail, dolly, humaneval_x; joined by commas.",
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="A directory with NAME.jsonl for each suite; otherwise the hub is asked.")
]
Prompts = Annotated[Path | None, typer.Option(help="A file of prompts instead: jsonl, or one a line.")]
Strategies = Annotated[str, typer.Option("--strategies", help="Strategies to measure, joined by commas.")]
Baselines = Annotated[
    str, typer.Option(help="Of transformers: generate, prompt_lookup, assisted; joined by commas, or none.")
]
Draft = Annotated[str | None, typer.Option(help="The draft model for assisted.")]
Limit = Annotated[int, typer.Option(help="Prompts of each suite.")]
Batch = Annotated[str, typer.Option(help="How many prompts at once; several sizes joined by commas.")]
Repeats = Annotated[int, typer.Option(help="Measure this often, in turn; times are medians.")]
Out = Annotated[Path, typer.Option(help="The file of all records. A run that was interrupted goes on from it.")]
Html = Annotated[Path | None, typer.Option(help="Write the report as a page.")]


def bench(
    suite: Suites = None,
    data: Data = None,
    prompts: Prompts = None,
    model: options.Model = "demo",
    strategies: Strategies = "auto",
    baselines: Baselines = "generate",
    draft: Draft = None,
    budget: options.Budget = None,
    limit: Limit = 10,
    max_new_tokens: options.MaxNewTokens = 128,
    batch: Batch = "1",
    repeats: Repeats = 1,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    pack: options.Pack = None,
    compile: options.Compile = False,
    exact: options.Exact = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    out: Out = Path("bench.json"),
    html: Html = None,
) -> None:
    """Decode prompts plainly, with strategies and with transformers, in turn: how fast, and are the texts identical?"""
    from lookfar import bench as measuring
    from lookfar.bench.page import BRIEF, brief, page
    from lookfar.files import replace_file
    from lookfar.loading import load

    sizes = _numbers(batch)
    sampling: dict[str, Any] = options.sampling(temperature, top_p, top_k, min_p, repetition_penalty, None)
    chosen = [name.strip() for name in strategies.split(",") if name.strip()]
    rows = options.rows(budget)
    if not suite and prompts is None:
        raise ConfigError("Give --suite NAMES (with --data DIR, or from the hub) or --prompts FILE.")
    lm = load(model, device=device, dtype=dtype, pack=pack, compile=compile, exact=exact, max_batch=max(sizes))
    results = measuring.run(
        lm,
        suites=[name.strip() for name in suite.split(",")] if suite else (),
        data=data,
        prompts=prompts,
        strategies=chosen,
        baselines=[] if baselines == "none" else [name.strip() for name in baselines.split(",")],
        draft=draft,
        budget=rows,
        limit=limit,
        max_new_tokens=max_new_tokens,
        batch=sizes,
        repeats=repeats,
        out=out,
        **sampling,
    )
    table = Table(*BRIEF, box=None, header_style="bold")
    lines = measuring.summarize(results)
    for line in lines:
        table.add_row(*brief(line))
    console = Console(highlight=False)
    console.print(table)
    for line in lines:
        if line.first_difference is not None:
            where = line.first_difference
            options.say(
                "Note",
                f"{line.contestant} on {line.suite}: {where.prompt} differs from token {where.token} on.",
                "yellow",
            )
    if html is not None:
        try:
            replace_file(html, [page(results).encode()])
        except OSError as error:
            raise ConfigError(f"{html} cannot be written: {error.strerror or error}.") from error
    console.print(f"[dim]{len(results.runs)} runs in {out}{f', the page in {html}' if html else ''}[/]")


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ConfigError(f"--batch takes numbers joined by commas, not {text!r}.")
    return [int(part) for part in parts]
