"""Single tokens and log-probabilities as responses show them."""

from __future__ import annotations

from typing import Any

from lookfar.lm import LM
from lookfar.server.logprobs import TokenLogprob

LOWEST = -9999.0  # JSON has neither infinity nor NaN


def token_text(lm: LM, token: int) -> str:
    """Return the text of one token, special tokens included; bytes that are no character become U+FFFD."""
    return str(lm.tokenizer.decode([token])) if lm.tokenizer is not None else str(token)


def shown_logprob(value: float) -> float:
    return value if value > LOWEST else LOWEST


def chat_logprobs(lm: LM, found: list[TokenLogprob], top: int) -> dict[str, Any]:
    """Return log-probabilities as chat completions show them."""
    return {
        "content": [
            {
                **_entry(lm, one.token, one.logprob),
                "top_logprobs": [_entry(lm, token, value) for token, value in one.top[:top]],
            }
            for one in found
        ],
        "refusal": None,
    }


def _entry(lm: LM, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(lm, token)
    return {"token": text, "logprob": shown_logprob(logprob), "bytes": list(text.encode("utf-8", "replace"))}
