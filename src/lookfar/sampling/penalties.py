"""Presence and frequency penalties, which transformers does not have."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class EmittedPenalty(LogitsProcessor):
    """Lowers the scores of tokens that the output holds: by `presence` once, by `frequency` for each occurrence."""

    row_wise = True

    def __init__(self, prompt_length: int, presence: float = 0.0, frequency: float = 0.0) -> None:
        self.prompt_length = prompt_length
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        emitted = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, emitted, torch.ones_like(emitted, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts
