"""How close a decision was: for outputs that differ in half precision."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from transformers import PreTrainedModel


def margin_after(model: PreTrainedModel, ids: Seq[int]) -> float:
    """Return the difference of the two highest logits after a text: near zero, rounding decides."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1]
    two = logits.float().topk(2).values
    return float(two[0] - two[1])
