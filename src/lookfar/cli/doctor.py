"""`lookfar doctor`: versions, machine, caches and what is accelerated, in one screen to paste into an issue."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lookfar.cli import options
from lookfar.core.progress import progress_bar


def doctor(as_json: options.Json = False) -> None:
    """Show versions, the machine, caches, and what is accelerated and why not: to paste into an issue. No secrets."""
    from lookfar.cli.diagnosis import diagnose

    with progress_bar("Importing torch"):
        found = diagnose()
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    table = Table.grid(padding=(0, 2))
    for section, facts in found.items():
        table.add_row(Text(section, style="bold cyan"))
        if section in ("versions", "extras"):  # short facts, several in a line
            table.add_row("", Text(", ".join(f"{name} {value}" for name, value in facts.items())))
            continue
        for name, value in facts.items():
            wrong = value.startswith(("no", "NOT"))
            table.add_row(Text(f"  {name}", style="dim"), Text(value, style="yellow" if wrong else ""))
        if not facts:
            table.add_row("", Text("none set", style="dim"))
    Console(highlight=False).print(table)
