"""Stopping rules: asked once for every emitted token, in order."""

from __future__ import annotations

import torch

from lookfar.engine.request import FinishReason, RequestState


def finish_reason(state: RequestState, tokens: list[int]) -> FinishReason | None:
    """Return why the text ends with the last of these new tokens; None if it goes on."""
    request, sampler = state.request, state.sampler
    if request.criteria:
        text = torch.tensor([sampler.context + tokens], device=request.sampling.device)
        scores = tuple(one[None] for one in sampler.scores) if request.sampling.keep_scores else None
        if bool(request.criteria(text, scores).any()):
            return "stop"
    if tokens[-1] in request.stop_ids:
        return "stop"
    return "length" if len(tokens) >= state.remaining else None
