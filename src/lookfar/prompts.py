"""Prompts as users give them → token ids, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookfar.errors import RequestError

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, Any]]
MESSAGE_FORM = 'chat takes a list of messages like {"role": "user", "content": "Hello"}.'


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """Return a prompt or a list of prompts as a list, and whether it was a single one."""
    if isinstance(prompt, str):
        return [prompt], True
    if isinstance(prompt, Mapping) and "input_ids" in prompt:  # what a tokenizer returns
        return _without_padding(prompt["input_ids"], prompt.get("attention_mask"))
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, (list, tuple, range)):
        raise RequestError(f"A prompt is a text, a list of token ids, or a list of those, not {type(prompt).__name__}.")
    items = list(items)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items], True
    if all(isinstance(item, (str, list, tuple)) for item in items):
        return items, False
    raise RequestError("A list of prompts holds texts or lists of token ids, and nothing else.")


def _without_padding(ids: Any, mask: Any) -> tuple[list[Prompt], bool]:
    """Return encoded prompts, in lists or tensors, without the padding that an attention mask hides."""
    prompts, single = as_prompts(ids)
    if mask is None:
        return prompts, single
    masks, _ = as_prompts(mask)
    if [len(prompt) for prompt in prompts] != [len(mask) for mask in masks]:
        raise RequestError("attention_mask must have the shape of input_ids.")
    pairs = zip(prompts, masks, strict=True)
    return [[token for token, seen in zip(prompt, mask, strict=True) if seen] for prompt, mask in pairs], single  # type: ignore[misc]


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("A text prompt needs a tokenizer: pass one to LM(model, tokenizer), or give token ids.")
        prompt = ids_of(tokenizer(_checked_text(prompt), verbose=False))
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        raise RequestError("A list of token ids holds whole numbers and nothing else.")
    ids = list(prompt)
    if not ids:
        raise RequestError("The prompt is empty: give at least one token.")
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise RequestError(f"Token id {bad[0]} is outside the vocabulary: ids go from 0 to {vocab_size - 1}.")
    return ids


def chat_text(messages: Messages, tokenizer: Any, as_parts: bool = False) -> str:
    """Format a conversation with the chat template of a tokenizer or processor, ready for the model's answer.

    Templates of multimodal models take the content of messages `as_parts`.
    """
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer: pass one to lookfar.LM(model, tokenizer).")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("This tokenizer has no chat template: use generate with a plain prompt.")
    texts = [{**message, "content": _message_text(message)} for message in _checked_messages(messages)]
    if as_parts:
        texts = [{**message, "content": _parts(message["content"])} for message in texts]
    return _checked_text(str(tokenizer.apply_chat_template(texts, add_generation_prompt=True, tokenize=False)))


def has_media(messages: Messages) -> bool:
    """Whether a message of a conversation holds images, audio or video."""
    parts = [part for message in _checked_messages(messages) for part in _parts(message.get("content")) or ()]
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


def parts_of(messages: Messages) -> list[dict[str, Any]]:
    """Return a conversation whose messages hold lists of parts."""
    return [{**message, "content": _parts(message.get("content"))} for message in _checked_messages(messages)]


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _checked_messages(messages: Messages) -> Messages:
    listed = isinstance(messages, Seq) and not isinstance(messages, str)
    if not listed or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError(MESSAGE_FORM)
    for message in messages:
        content = message.get("content")
        if "role" not in message or not (isinstance(content, (str, list, tuple)) or "tool_calls" in message):
            raise RequestError(MESSAGE_FORM)
    return messages


def _message_text(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message, whose content is a text or a list of text parts; None for a mere tool call."""
    content = message.get("content")
    if "role" in message and (isinstance(content, str) or (content is None and "tool_calls" in message)):
        return content
    if "role" not in message or not isinstance(content, (list, tuple)):
        raise RequestError(MESSAGE_FORM)
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        raise RequestError('The content of a message is a text, or parts like {"type": "text", "text": "Hello"}.')
    return "".join(texts)


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The prompt holds half a character at position {error.start} (a lone surrogate): remove it."
        ) from None
    return text


def ids_of(encoded: Any) -> list[int]:
    """Return the ids of an encoded text."""
    ids: list[int] = encoded.input_ids
    return ids
