"""Printing an answer while it is decoded, and its summary: shared by `generate` and `chat`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from threading import Event, current_thread, main_thread
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from lookfar.cli.colours import COLOURS

if TYPE_CHECKING:
    from lookfar.engine.stats import Stats
    from lookfar.streams import Chunk, Stream


def show_answer(
    stream: Stream, out: Console, on_chunk: Callable[[Chunk], None] = lambda _: None
) -> tuple[str, Chunk | None, bool]:
    """Print an answer as it comes. Returns its text, its last chunk, and whether Ctrl-C stopped it.

    The first Ctrl-C waits for the step that is running, the second one does not.
    """
    text, last, stopped = "", None, False
    colours = cycle(COLOURS)
    try:
        with stream, interrupts() as interrupted:
            for chunk in stream:
                on_chunk(chunk)
                out.print(Text(chunk.text, style=next(colours)), end="", soft_wrap=True)
                text, last = text + chunk.text, chunk
                if interrupted.is_set():
                    stopped = True
                    break
    except KeyboardInterrupt:
        stopped = True
    out.print()
    return text, last, stopped


def summary(stats: Stats) -> str:
    return (
        f"{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens per step, "
        f"{stats.rows_per_step:.1f} rows per step, {stats.tokens_per_second:.1f} tokens/s"
    )


@contextmanager
def interrupts() -> Iterator[Event]:
    """Record Ctrl-C, to stop after the present chunk; a second Ctrl-C raises `KeyboardInterrupt` as usual."""
    pressed = Event()
    if current_thread() is not main_thread():
        yield pressed
        return
    before = signal.getsignal(signal.SIGINT)

    def record(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, record)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
