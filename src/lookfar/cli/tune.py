"""`lookfar tune`: the fastest settings for a model, a machine and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lookfar.cli import options
from lookfar.errors import ConfigError

Prompts = Annotated[Path | None, typer.Option(help="Your own prompts: jsonl, or one per line.")]
Suites = Annotated[str | None, typer.Option("--suite", help="Suites instead, joined by commas.")]
Data = Annotated[Path | None, typer.Option(help="A directory with NAME.jsonl for each suite.")]
Minutes = Annotated[float, typer.Option(help="Time limit.")]
Limit = Annotated[int, typer.Option(help="Prompts of each suite, or of the file.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the result; keep nothing.")]


def tune(
    prompts: Prompts = None,
    suite: Suites = None,
    data: Data = None,
    model: options.Model = "demo",
    minutes: Minutes = 10.0,
    limit: Limit = 30,
    max_new_tokens: options.MaxNewTokens = 128,
    pack: options.Pack = None,
    compile: options.Compile = False,
    exact: options.Exact = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    dry_run: DryRun = False,
) -> None:
    """Find the fastest settings on some prompts and keep them for `load`; they are compared on other prompts."""
    options.prepare()
    from lookfar.bench.suites import read_prompts, read_suite
    from lookfar.bench.tune import tune as find
    from lookfar.drafters.registry import describe, name_of
    from lookfar.profiles import save_profile

    if (prompts is None) == (suite is None):
        raise ConfigError("Give --prompts FILE or --suite NAMES, one of the two.")
    if prompts is not None:
        found = read_prompts(prompts, limit)
    else:
        assert suite is not None
        by_suite = [read_suite(name, data, limit) for name in options.names(suite)]
        found = [prompt for some in zip(*by_suite, strict=False) for prompt in some]  # in turn
    lm = options.load(
        model,
        device=device,
        dtype=dtype,
        pack=pack,
        compile=compile,
        exact=exact,
        max_batch=1,
        strategy="auto",
    )
    console = Console(highlight=False)
    profile = find(
        lm,
        [prompt.ids(lm) for prompt in found],
        minutes=minutes,
        max_new_tokens=max_new_tokens,
        say=lambda message: console.print(f"[dim]{message}[/]"),
    )
    table = Table("tried", "tokens/s", "prompts", box=None, header_style="bold")
    for name, rate, rounds in profile.tried:
        table.add_row(name, f"{rate:.1f}", str(rounds))
    console.print(table)
    chosen = describe(profile.strategies) if profile.strategies else "no speculation"
    rows = f" with {profile.budget} rows per step" if profile.budget is not None else ""
    if name_of(profile.strategies) == "auto" and profile.budget == "auto":
        chosen, rows = "the defaults", ""
    console.print(f"Fastest: [bold]{chosen}[/]{rows}, {profile.over_none:.2f}× decoding without speculation.")
    if not dry_run:
        console.print(f"[dim]Kept in {save_profile(lm.engine.runner, profile)}; load uses it from now on.[/]")
