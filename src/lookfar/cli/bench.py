"""`lookfar bench`: speed next to transformers. `lookfar bench steps`: the cost of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lookfar.cli import options
from lookfar.errors import ConfigError

if TYPE_CHECKING:
    from lookfar.bench.curve import CurveCheck
    from lookfar.bench.summary import Line
    from lookfar.lm import LM

Suites = Annotated[
    str | None,
    typer.Option(
        "--suite",
        help="mt_bench, humaneval, gsm8k, mbpp, classeval, xsum, cnn_dailymail, dolly, humaneval_x; joined by commas.",
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="A directory with NAME.jsonl for each suite; otherwise they come from the hub.")
]
Prompts = Annotated[Path | None, typer.Option(help="A file of prompts instead: jsonl, or one per line.")]
Strategies = Annotated[str, typer.Option("--strategies", help="Strategies to measure, joined by commas.")]
Baselines = Annotated[
    str, typer.Option(help="Of transformers: generate, prompt_lookup, assisted; joined by commas, or none.")
]
Draft = Annotated[str | None, typer.Option(help="The draft model for assisted.")]
Limit = Annotated[int, typer.Option(help="Prompts of each suite.")]
Batch = Annotated[str, typer.Option(help="Prompts at once; several sizes joined by commas.")]
Repeats = Annotated[int, typer.Option(help="Measure this often; times are medians.")]
Out = Annotated[Path, typer.Option(help="The file of all records. An interrupted benchmark is resumed from it.")]
Html = Annotated[Path | None, typer.Option(help="Write the report as a page.")]


app = typer.Typer(invoke_without_command=True, help="Measure speed next to transformers, and the cost of a step.")


@app.callback()
def bench(
    context: typer.Context,
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
    exact: options.Exact = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    out: Out = Path("bench.json"),
    html: Html = None,
) -> None:
    """Decode prompts with strategies and with transformers, in turn; report speed and differences."""
    if context.invoked_subcommand is not None:
        return
    _check_files(out, html)
    options.prepare()
    from lookfar import bench as measuring
    from lookfar.bench.page import page

    sizes, rows = _numbers(batch), options.rows(budget)
    sampling: dict[str, Any] = options.sampling(temperature, top_p, top_k, min_p, repetition_penalty, None)
    if not suite and prompts is None:
        raise ConfigError("Give --suite NAMES (with --data DIR, or from the hub) or --prompts FILE.")
    lm = options.load(model, device=device, dtype=dtype, pack=pack, compile=compile, exact=exact, max_batch=max(sizes))
    results = measuring.run(
        lm,
        suites=options.names(suite) if suite else (),
        data=data,
        prompts=prompts,
        strategies=[name for name in options.names(strategies) if name],
        baselines=[] if baselines == "none" else options.names(baselines),
        draft=draft,
        budget=rows,
        limit=limit,
        max_new_tokens=max_new_tokens,
        batch=sizes,
        repeats=repeats,
        out=out,
        **sampling,
    )
    _show(measuring.summarize(results))
    if html is not None:
        options.write_page(html, page(results))
    _say_where(len(results.runs), out, html)


def _check_files(out: Path, html: Path | None) -> None:
    """Refuse files that cannot be written, or hold something else, before anything is loaded."""
    options.check_page(html)
    options.check_writable(out, "--out")
    if out.exists():
        from lookfar.bench.records import Results

        Results.load(out)


def _say_where(runs: int, out: Path, html: Path | None) -> None:
    page_note = f", the page in {html}" if html else ""
    Console(highlight=False).print(f"[dim]{runs} runs in {out}{page_note}[/]")


def _show(lines: list[Line]) -> None:
    """Print the table of a benchmark, and where outputs differ."""
    from lookfar.bench.page import TERMINAL_HEADINGS, terminal_row

    table = Table(*TERMINAL_HEADINGS, box=None, header_style="bold")
    shown = None
    for line in lines:
        if (line.suite, line.batch) != shown:
            shown = line.suite, line.batch
            table.add_row(f"[bold]{line.suite}[/]" + (f" in batches of {line.batch}" if line.batch > 1 else ""))
        table.add_row(*terminal_row(line))
    Console(highlight=False).print(table)
    for line in lines:
        if (where := line.first_difference) is not None:
            sentence = f"{line.method} on {line.suite}: {where.prompt} differs from token {where.token} on."
            options.say("Note", sentence, "yellow")


@app.command()
def steps(
    model: Annotated[str | None, typer.Option(help="demo, a directory of a saved model, or a hub name.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights instead: llama-3-8b, qwen2.5-7b, smollm2-135m, or a config file.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens before the step, joined by commas.")] = "128,512,2048",
    compile: options.Compile = False,
    exact: options.Exact = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    html: Html = None,
    as_json: options.Json = False,
) -> None:
    """Measure the milliseconds of a step with 1 to 256 rows, and check the cost curve that is in use."""
    options.check_page(html)
    options.prepare()
    from lookfar.bench.curve import check_curve
    from lookfar.bench.steps import measure_steps, steps_page

    lengths = _numbers(contexts, "--contexts")
    if (model is None) == (shape is None):
        raise ConfigError("Give --model NAME or --shape NAME, one of the two.")
    if shape is not None:
        lm = _random_lm(shape, device, dtype, compile, exact)
    else:
        lm = options.load(str(model), device=device, dtype=dtype, compile=compile, exact=exact)
    found = measure_steps(lm.engine.runner, shape or str(model), lengths)
    curve = check_curve(lm.engine.runner)
    if html is not None:
        options.write_page(html, steps_page(found, curve))
    if as_json:
        print(json.dumps(found.as_dict() | {"cost_curve": curve.as_dict() if curve is not None else None}))
        return
    table = Table("rows", *(f"after {n} tokens" for n in found.milliseconds), box=None, header_style="bold")
    for rows in next(iter(found.milliseconds.values())):
        table.add_row(str(rows), *(f"{curve[rows]:.2f} ms" for curve in found.milliseconds.values()))
    table.add_row("nearly free", *(f"{found.critical(c)} rows" for c in found.milliseconds))
    table.add_row("of the floor", *(f"{found.share(c):.0%}" for c in found.milliseconds))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"[dim]{found.model}, {found.runner} on {found.device}. The floor is {found.floor:.2f} ms: "
        f"{found.weight_bytes / 1e9:.2f} GB of weights at {found.bandwidth / 1e9:.0f} GB/s, measured.[/]"
    )
    _show_curve(curve, console)


def _show_curve(curve: CurveCheck | None, console: Console) -> None:
    """Print the cost curve in use next to fresh measurements."""
    from lookfar.bench.curve import HEADINGS, NO_CURVE

    if curve is None:
        console.print(f"[dim]{NO_CURVE}[/]")
        return
    table = Table(*HEADINGS, box=None, header_style="bold", title="The cost curve in use, after 256 tokens")
    for row in curve.table():
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print(f"[dim]Steps are {curve.drift:.2f} times as slow as the curve says (drift).[/]")


def _random_lm(shape: str, device: str | None, dtype: str | None, compile: bool, exact: bool | None) -> LM:
    import torch

    from lookfar.bench.steps import random_model
    from lookfar.lm import LM
    from lookfar.models.pretrained import available_device

    place = available_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32"), None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"Unknown dtype {dtype!r}: use float32, float16 or bfloat16.")
    return LM(random_model(shape, place, kind), compile=compile, exact=exact)


def _numbers(text: str, option: str = "--batch") -> list[int]:
    parts = options.names(text)
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ConfigError(f"{option} takes numbers joined by commas, not {text!r}.")
    return [int(part) for part in parts]
