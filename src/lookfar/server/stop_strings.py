"""Stop strings: the engine ends a request at the token that completes one, and the answer ends before it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from lookfar.detokenizer import Detokenizer, detokenizer


class StopTextCriterion(StoppingCriteria):
    """Ends a request when its text holds a stop string.

    transformers' own criterion reads the whole vocabulary for every new stop string, which takes 0.2 s; this one reads
    the text as it grows. It is asked once for every emitted token, in order, or again from an earlier token when a step
    is repeated.
    """

    row_wise = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Seq[str], prompt_length: int) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._keep = max(map(len, stops)) - 1  # characters that the beginning of a stop string may have
        self._prompt_length = prompt_length
        self._start()

    def _start(self) -> None:
        self._text: Detokenizer = detokenizer(self._tokenizer)
        self._read, self._tail = self._prompt_length, ""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        length = input_ids.shape[1]
        if length <= self._read:
            self._start()
        new = self._text.add(input_ids[0, self._read :].tolist())
        text = self._tail + new
        self._read, self._tail = length, text[len(text) - self._keep :] if self._keep else ""
        found = any(stop in text for stop in self._stops)
        return torch.full((1,), found, device=input_ids.device)


class StopTextFilter:
    """Cuts a text, given in pieces, before the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Seq[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Return the text that is certainly in front of any stop string."""
        if not self._stops or self.found:
            return "" if self.found else piece
        text = self._held + piece
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
