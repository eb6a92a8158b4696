"""Ids → text as it grows: pieces that add up to the whole, none of which ends inside a character."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what tokenizers make of bytes that are no character yet


class GrowingText:
    """Decodes tokens as they come. Half a character waits for its other half."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # tokens from here on are decoded; a few known ones first, for their effect on spaces
        self._told = 0  # tokens up to here have been told

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens complete."""
        self._ids += tokens
        before, now = self._decode(self._told), self._decode(len(self._ids))
        if now.endswith(UNFINISHED) or not now.startswith(before):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        """What is left when nothing more comes."""
        before, now = self._decode(self._told), self._decode(len(self._ids))
        self._told = len(self._ids)
        return now[len(before) :]

    def _decode(self, end: int) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True))
