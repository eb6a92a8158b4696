"""Log-probabilities of emitted tokens and of their alternatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessor

from lookfar.core.arrays import Floats


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer, with the most likely tokens at its place, most likely first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class _Row:
    logprobs: Floats  # [vocabulary]
    top: list[tuple[int, float]]


class LogprobRecorder(LogitsProcessor):
    """Records the model's distribution at every position, before any other processor changes the logits.

    Processors are called once for every emitted token, in the driver's thread; `take` reads a position in another
    thread, after its token has been delivered.
    """

    row_wise = True

    def __init__(self, prompt_length: int, top: int) -> None:
        self._prompt_length = prompt_length
        self._top = top
        self._rows: dict[int, _Row] = {}  # by position in the answer

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logprobs = torch.log_softmax(scores[0].float(), -1)
        values, ids = logprobs.topk(min(self._top, len(logprobs)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        self._rows[input_ids.shape[1] - self._prompt_length] = _Row(logprobs.cpu().numpy(), top)
        return scores

    def take(self, position: int, token: int) -> TokenLogprob:
        """Return the log-probabilities at a position where `token` was emitted, and forget them."""
        row = self._rows.pop(position)
        return TokenLogprob(token, float(row.logprobs[token]), row.top)
