"""What `generate` and `chat` share: an answer on the screen while it is decoded, and what it took."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import cycle
from threading import Event, current_thread, main_thread
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from lookfar.cli.steps import COLOURS

if TYPE_CHECKING:
    from lookfar.lm import Chunk
    from lookfar.stats import Stats


def show_answer(chunks: Generator[Chunk, None, None], out: Console) -> tuple[str, Chunk | None, bool]:
    """Print an answer as it comes. Returns its text, its last chunk, and whether Ctrl-C stopped it."""
    text, last = "", None
    colours = cycle(COLOURS)
    with _interrupts() as interrupted:
        for chunk in chunks:
            out.print(Text(chunk.text, style=next(colours)), end="", soft_wrap=True)
            text, last = text + chunk.text, chunk
            if interrupted.is_set():
                break
        chunks.close()  # frees the slot, and keeps what is in it for the next turn
    out.print()
    return text, last, interrupted.is_set()


def summary(stats: Stats) -> str:
    return (
        f"{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens a step, "
        f"{stats.rows_per_step:.1f} rows a step, {stats.tokens_per_second:.1f} tokens/s"
    )


@contextmanager
def _interrupts() -> Iterator[Event]:
    """Ctrl-C is noted between two steps instead of breaking one off; a second one ends the program as usual."""
    noted = Event()
    if current_thread() is not main_thread():
        yield noted
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        noted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
