"""Incremental detokenization: token ids → text as it grows, in pieces that never end inside a character."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what tokenizers make of bytes that are no character yet
_byte_tokens: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, frozenset[int]]] = WeakKeyDictionary()


class Detokenizer(Protocol):
    """Decodes tokens as they come. The pieces add up to the text of all tokens, without special tokens."""

    def add(self, tokens: list[int]) -> str:
        """Return the text that these tokens complete."""

    def end(self) -> str:
        """Return what is left when no more tokens come."""


def detokenizer(tokenizer: PreTrainedTokenizerBase | None) -> Detokenizer:
    """Return a detokenizer: the one of `tokenizers` where its pieces add up; without a tokenizer, no text.

    `DecodeStream` fails on byte tokens that do not form characters (SentencePiece models), and does not know the
    clean-up of spaces that some tokenizers do.
    """
    if tokenizer is None:
        return NoText()
    bytes_ = byte_tokens(tokenizer)
    fast = getattr(tokenizer, "is_fast", False) and type(tokenizer).decode is PreTrainedTokenizerBase.decode
    if fast and not bytes_ and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return StreamDetokenizer(tokenizer)
    return WindowDetokenizer(tokenizer, bytes_)


def byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of tokens that stand for single bytes, as SentencePiece models have them.

    Looking them up takes milliseconds, so they are kept as long as no tokens are added.
    """
    size, found = _byte_tokens.get(tokenizer, (-1, frozenset()))
    if size != len(tokenizer):
        unknown = tokenizer.unk_token_id
        ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
        found = frozenset(i for i in ids if i is not None and i != unknown)
        _byte_tokens[tokenizer] = len(tokenizer), found
    return found


class NoText:
    """The text of a model without a tokenizer."""

    def add(self, tokens: list[int]) -> str:
        return ""

    def end(self) -> str:
        return ""


class StreamDetokenizer:
    """Uses `DecodeStream` of the tokenizers library, which decodes a token in about a microsecond."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._length = 0  # of the text that was returned

    def add(self, tokens: list[int]) -> str:
        self._ids += tokens
        backend = self.tokenizer.backend_tokenizer
        text = "".join(self._stream.step(backend, token) or "" for token in tokens)
        self._length += len(text)
        return text

    def end(self) -> str:
        """Return bytes that never became a character, as the tokenizer shows them."""
        text = str(self.tokenizer.decode(self._ids, skip_special_tokens=True))[self._length :]
        self._length += len(text)
        return text


class WindowDetokenizer:
    """Decodes a window of recent tokens twice, without and with the new ones, and returns the difference.

    A run of byte tokens is decoded as a whole, so it waits for the token behind it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, byte_ids: frozenset[int] = frozenset()) -> None:
        self.tokenizer = tokenizer
        self._waits = byte_ids | set(tokenizer.all_special_ids) if byte_ids else byte_ids  # special ones are left out
        self._ids: list[int] = []
        self._start = 0  # tokens from here on are decoded: a few known ones, for their effect on spaces
        self._done = 0  # tokens up to here have been returned as text

    def add(self, tokens: list[int]) -> str:
        self._ids += tokens
        if self._ids and self._ids[-1] in self._waits:
            return ""
        before, now = self._decode(self._done), self._decode(len(self._ids))
        if (now.endswith(INCOMPLETE) and not self._waits) or not now.startswith(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        before, now = self._decode(self._done), self._decode(len(self._ids))
        self._done = len(self._ids)
        return now[len(before) :]

    def _decode(self, end: int) -> str:
        return str(self.tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True))
