"""Progress bars on standard error that leave nothing behind. There is one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

Advance = Callable[[int], None]
Say = Callable[[str], None]
_shown: list[tuple[str, Say]] = []  # the text of the bar that is shown, and a function that changes it


@contextmanager
def progress_bar(text: str, total: int | None = None, done: int = 0, unit: str = "") -> Iterator[Advance]:
    """Show `text` and a bar while the block runs; the yielded function advances the bar by an amount.

    While another bar is shown, that one shows the text, until the block ends.
    """
    if _shown:
        before, say = _shown[-1]
        _shown.append((text, say))
        say(text)
        try:
            yield lambda step: None
        finally:
            _shown.pop()
            say(before)
        return
    amount = [DownloadColumn()] if unit == "bytes" else [MofNCompleteColumn()] if total is not None else []
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn()]
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total, completed=done)
        _shown.append((text, lambda text: progress.update(task, description=text)))
        try:
            yield lambda step: progress.advance(task, step)
        finally:
            _shown.pop()
