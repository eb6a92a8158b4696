"""Progress bars on standard error that leave nothing behind. There is one at a time.

Where standard error is no terminal, the commands print a line for each wait of more than a second instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

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
PATIENCE = 1.0  # seconds after which a wait is worth a line
_shown: list[tuple[str, Say]] = []  # the text of the bar that is shown, and a function that changes it
_as_lines = False
_printed: list[str] = []  # the last line


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
            with _line_for(text):
                yield _counted(text, total, done, say)
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
            with _line_for(text):
                yield lambda step: progress.advance(task, step)
        finally:
            _shown.pop()
            _printed.clear()


def _counted(text: str, total: int | None, done: int, say: Say) -> Advance:
    """Return a function that says how far along an inner block is, in its text."""

    def advance(step: int) -> None:
        nonlocal done
        done += step
        if total:
            say(f"{text}, {min(100 * done // total, 100)} %")

    return advance


def say_as_lines(on: bool = True) -> None:
    """Print a line for each longer wait where there is no terminal. A library has no business there; a command does."""
    global _as_lines
    _as_lines = on


def _print_line(text: str) -> None:
    """Print a line, once for nested blocks of one text, and only for the innermost block."""
    if _shown and _shown[-1][0] == text and _printed[-1:] != [text]:
        _printed[:] = [text]
        print(f"{text} …", file=sys.stderr, flush=True)


@contextmanager
def _line_for(text: str) -> Iterator[None]:
    """Print a line if the block takes longer than `PATIENCE`."""
    if not _as_lines or sys.stderr.isatty():
        yield
        return
    timer = Timer(PATIENCE, _print_line, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
