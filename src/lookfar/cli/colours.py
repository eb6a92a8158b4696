"""Text coloured by step: tokens of one step share a colour."""

from __future__ import annotations

from itertools import cycle

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lookfar.detokenizer import detokenizer

COLOURS = ("cyan", "yellow", "green", "magenta")


def coloured(tokenizer: PreTrainedTokenizerBase, ids: list[int], step_sizes: list[int]) -> Text:
    """Return a whole output, coloured by step."""
    colours, growing, text, start = cycle(COLOURS), detokenizer(tokenizer), Text(), 0
    for size in step_sizes:
        text.append(growing.add(ids[start : start + size]), style=next(colours))
        start += size
    return text.append(growing.end(), style=next(colours))
