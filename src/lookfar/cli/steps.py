"""Text coloured by step: tokens that came out of one forward pass share a colour."""

from __future__ import annotations

from itertools import cycle

from rich.text import Text
from transformers import PreTrainedTokenizerBase

COLOURS = ("cyan", "yellow", "green", "magenta")


class StepPrinter:
    """Turns a growing list of ids into pieces of text, one a step; half a character waits for its other half."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""
        self._colours = cycle(COLOURS)

    def piece(self, tokens: list[int]) -> Text:
        """The text that a step added, in the next colour."""
        self.ids += tokens
        text = str(self.tokenizer.decode(self.ids, skip_special_tokens=True))
        colour = next(self._colours)
        if text.endswith("\ufffd"):
            return Text()
        new, self.shown = text[len(self.shown) :], text
        return Text(new, style=colour)


def coloured(tokenizer: PreTrainedTokenizerBase, ids: list[int], step_sizes: list[int]) -> Text:
    """A whole output, coloured by step."""
    printer, text, start = StepPrinter(tokenizer), Text(), 0
    for size in step_sizes:
        text.append_text(printer.piece(ids[start : start + size]))
        start += size
    return text
