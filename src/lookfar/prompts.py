"""Prompts as users give them → token ids, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookfar.errors import RequestError

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, str]]


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """Return a prompt or a list of prompts as a list, and whether it was a single one."""
    if isinstance(prompt, str):
        return [prompt], True
    try:
        items = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    except TypeError:
        raise RequestError(
            f"A prompt is a text, a list of token ids, or a list of those, not {type(prompt).__name__}."
        ) from None
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items], True
    if all(isinstance(item, (str, list, tuple)) for item in items):
        return items, False
    raise RequestError("A list of prompts holds texts or lists of token ids, and nothing else.")


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("A text prompt needs a tokenizer: pass one to LM(model, tokenizer), or give token ids.")
        prompt = ids_of(tokenizer(prompt, verbose=False))
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        raise RequestError("A list of token ids holds whole numbers and nothing else.")
    ids = list(prompt)
    if not ids:
        raise RequestError("The prompt is empty: give at least one token.")
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise RequestError(f"Token id {bad[0]} is outside the vocabulary: ids go from 0 to {vocab_size - 1}.")
    return ids


def chat_text(messages: Messages, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Format a conversation with the tokenizer's chat template, ready for the model's answer."""
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer: pass one to lookfar.LM(model, tokenizer).")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("This tokenizer has no chat template: use generate with a plain prompt.")
    if not messages or not all("role" in message and "content" in message for message in messages):
        raise RequestError('chat takes a list of messages like {"role": "user", "content": "Hello"}.')
    return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))


def ids_of(encoded: Any) -> list[int]:
    """Return the ids of an encoded text."""
    ids: list[int] = encoded.input_ids
    return ids
