"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from lookfar.lm import LM
from lookfar.server.chat import prompt_ids
from lookfar.server.errors import invalid
from lookfar.server.parameters import checked_ids
from lookfar.server.schemas import DetokenizeBody, TokenizeBody


def tokenize(lm: LM, body: TokenizeBody) -> dict[str, Any]:
    """Return the token ids of a text or of messages."""
    if lm.tokenizer is None:
        raise invalid(None, "This model has no tokenizer.")
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Give prompt or messages.")
    if body.messages is not None:
        ids = prompt_ids(lm, body.messages)
    elif not body.prompt:
        ids = []
    elif body.add_special_tokens:
        ids = checked_ids(lm, body.prompt)
    else:
        ids = lm.template_ids(body.prompt)
    made: dict[str, Any] = {"count": len(ids), "max_model_len": lm.engine.max_length, "tokens": ids}
    if body.return_token_strs:
        made["token_strs"] = lm.tokenizer.convert_ids_to_tokens(ids)
    return made


def detokenize(lm: LM, body: DetokenizeBody) -> dict[str, Any]:
    """Return the text of token ids, special tokens included."""
    if lm.tokenizer is None:
        raise invalid(None, "This model has no tokenizer.")
    ids = checked_ids(lm, body.tokens, "tokens") if body.tokens else []
    return {"prompt": str(lm.tokenizer.decode(ids))}
