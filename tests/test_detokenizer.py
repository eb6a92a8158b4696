"""Incremental detokenization: pieces that add up to the whole text, for every kind of tokenizer."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from helpers import byte_tokenizer
from lookfar.detokenizer import NoText, StreamDetokenizer, WindowDetokenizer, byte_tokens, detokenizer

TEXT = "Grüße aus 東京 🌍! "


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: words with a space in front, and tokens for single bytes."""
    words = ["▁the", "▁cat", "s", "▁", "at", "on", "▁mat", "ü"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def wordpiece() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[CLS]", "the", "##s", "cat", "'", ",", ".", "##at"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]")


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece, wordpiece])
@given(st.integers(0, 10**9), st.integers(0, 40), st.integers(1, 5))
@settings(max_examples=200)
def test_pieces_add_up_whatever_the_tokens(make, seed: int, length: int, size: int) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    rng = random.Random(seed)
    ids = [rng.randrange(len(tokenizer)) for _ in range(length)]
    growing = detokenizer(tokenizer)
    pieces = [growing.add(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) + growing.end() == tokenizer.decode(ids, skip_special_tokens=True)
    assert growing.end() == ""


def test_no_piece_ends_inside_a_character() -> None:
    tokenizer = byte_tokenizer()
    growing = detokenizer(tokenizer)
    pieces = [growing.add([token]) for token in tokenizer(TEXT).input_ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == TEXT


def test_the_library_is_used_where_its_pieces_add_up() -> None:
    assert isinstance(detokenizer(byte_tokenizer()), StreamDetokenizer)
    assert isinstance(detokenizer(wordpiece()), StreamDetokenizer)
    assert isinstance(detokenizer(sentencepiece()), WindowDetokenizer)
    assert len(byte_tokens(sentencepiece())) == 256
    cleans = byte_tokenizer()
    cleans.clean_up_tokenization_spaces = True
    assert isinstance(detokenizer(cleans), WindowDetokenizer)
    nothing = detokenizer(None)
    assert isinstance(nothing, NoText)
    assert nothing.add([1, 2]) + nothing.end() == ""
