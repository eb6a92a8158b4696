"""What lookfar cannot speed up, transformers decodes: those tokens are right by definition."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

from lookfar.memory import Memory
from lookfar.sequence import OnTokens, Request, Sequence


class _Follow(BaseStreamer):
    """Keeps the sequence in step with what `generate` emits."""

    def __init__(self, sequence: Sequence, on_tokens: OnTokens | None) -> None:
        self.sequence = sequence
        self.on_tokens = on_tokens
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:  # transformers streams the prompt first
            self.prompt_seen = True
            return
        for token in value.flatten().tolist():
            taken = self.sequence.append([token])
            self.sequence.stats.rows += 1
            if taken and self.on_tokens is not None:
                self.on_tokens(self.sequence, taken)

    def end(self) -> None:
        pass


def decode_plainly(
    model: PreTrainedModel, request: Request, index: int, memory: Memory, on_tokens: OnTokens | None = None
) -> Sequence:
    """Decode one request with `model.generate`."""
    sequence = Sequence(request, index, memory)
    ids = torch.tensor([request.prompt], device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=sorted(request.stop_ids) or None,
        pad_token_id=min(request.stop_ids, default=0),
        streamer=_Follow(sequence, on_tokens),
    )
    return sequence
