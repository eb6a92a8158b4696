"""`lookfar top`: what a server does, live in the terminal."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lookfar.cli.remote import Key, Server

BARS = " ▁▂▃▄▅▆▇█"
WINDOW = 5  # snapshots over which rates are taken
WIDTH = 60  # of a curve

Url = Annotated[str, typer.Argument(help="The address of the server.")]
Once = Annotated[bool, typer.Option("--once", help="Print the present state and end.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")]


def top(url: Url = "http://127.0.0.1:8000", key: Key = None, seconds: Seconds = 1.0, once: Once = False) -> None:
    """Watch a server: load, speed, tokens per step, drafters, caches. Ctrl-C ends it."""
    server, console = Server(url, key), Console(highlight=False)
    status = server.get("/lookfar/status")
    history = list(status["history"])
    if once:
        console.print(view(server.url, status, history))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(view(server.url, status, history), refresh=True)
            time.sleep(seconds)
            status = server.get(f"/lookfar/status?since={history[-1]['time'] if history else 0}")
            history = [*history, *status["history"]][-300:]


def view(url: str, status: dict[str, Any], history: list[dict[str, Any]]) -> RenderableType:
    """Return the whole screen."""
    now = status["now"]
    seen = [*history, now]
    before = seen[max(0, len(seen) - 1 - WINDOW)]
    head = Text.assemble(
        (status["model"], "bold"), f" on {status['device']} at {url}, lookfar {status['version']}", style="default"
    )
    facts = Table.grid(padding=(0, 3))
    for name, value in (
        (
            "answers",
            f"{now['running']} of {now['max_batch']} running, {now['waiting']} waiting, {now['paused']} paused",
        ),
        ("tokens/s", f"{_rate(now, before, 'tokens'):.1f}"),
        ("steps/s", f"{_rate(now, before, 'steps'):.1f}"),
        ("tokens per step", f"{_ratio(now, before, 'tokens', 'decoded'):.2f}"),
        ("rows per step", f"{_ratio(now, before, 'rows', 'steps'):.1f}"),
        ("KV cache", f"{_mib(now['kv_bytes'])}, prefixes {_mib(now['prefix_bytes'])}"),
        ("cached prompt tokens", f"{100 * _ratio(now, None, 'cached_tokens', 'prompt_tokens'):.0f} %"),
        ("draft store", f"{now['store_tokens']:,} tokens"),
        ("requests", ", ".join(f"{count:,} {name}" for name, count in now["outcomes"].items()) or "none yet"),
        ("speculation", ", ".join(f"{n}: {'on' if on else 'off'}" for n, on in now["speculating"].items()) or "–"),
    ):
        facts.add_row(Text(name, style="dim"), value)
    curve = [_rate(b, a, "tokens") for a, b in zip(seen[-WIDTH - 1 :], seen[-WIDTH:], strict=False)]
    parts = [head, facts, Text(f"{sparkline(curve)}  tokens/s", style="cyan"), drafter_table(now["drafters"])]
    return Panel(Group(*parts), title="lookfar top", border_style="dim")


def drafter_table(drafters: dict[str, list[int]]) -> RenderableType:
    """Return how many draft tokens of each drafter were accepted."""
    if not drafters:
        return Text("No drafts yet.", style="dim")
    table = Table("drafter", "proposed", "accepted", "", box=None, header_style="dim")
    for name, (proposed, accepted) in sorted(drafters.items(), key=lambda item: -item[1][1]):
        table.add_row(name, f"{proposed:,}", f"{accepted:,}", f"{100 * accepted / max(proposed, 1):.0f} %")
    return table


def sparkline(values: list[float]) -> str:
    """Return a curve in one line."""
    highest = max(values, default=0.0) or 1.0
    return "".join(BARS[round((len(BARS) - 1) * max(value, 0.0) / highest)] for value in values)


def _rate(now: dict[str, Any], before: dict[str, Any], name: str) -> float:
    seconds = now["time"] - before["time"]
    return float(now[name] - before[name]) / seconds if seconds > 0 else 0.0


def _ratio(now: dict[str, Any], before: dict[str, Any] | None, part: str, whole: str) -> float:
    """Return a ratio of what was added since `before`, or of all if nothing was."""
    if before is not None and now[whole] > before[whole]:
        return float(now[part] - before[part]) / float(now[whole] - before[whole])
    return float(now[part]) / now[whole] if now[whole] else 0.0


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
