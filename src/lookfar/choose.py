"""Logits → tokens, as `generate` does it: processors on the place's own text, then the best token or a draw."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel

from lookfar.arrays import Floats, Int32s, Ints
from lookfar.errors import RequestError
from lookfar.noise import Draws

NO_TOKEN = -1  # drawn where the scores hold no number


def greedy(logits: torch.Tensor) -> Ints:
    """The choice of every row, [batch, rows]; one copy from the device."""
    # float32 even for float64 models: transformers compares the logits in float32.
    chosen: Ints = logits.float().argmax(-1).cpu().numpy().astype(np.int64)
    return chosen


def best(logits: torch.Tensor, count: int) -> tuple[Int32s, Floats]:
    """The `count` best tokens of every row and their logits, [batch, rows, count], best first."""
    values, ids = logits.float().topk(min(count, logits.shape[-1]), -1)
    return ids.to(torch.int32).cpu().numpy(), values.cpu().numpy()


def scores_after(processors: LogitsProcessorList | None, text: Seq[int], logits: torch.Tensor) -> torch.Tensor:
    """What is made of the logits after a text, [vocabulary] → [1, vocabulary]."""
    scores = logits[None].to(torch.float32, copy=True)
    if not processors:
        return scores
    made: torch.Tensor = processors(torch.tensor([text], device=logits.device, dtype=torch.long), scores)
    return made


def odds(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Whoever has the highest is drawn."""
    return torch.softmax(scores, -1) / noise.to(scores.device)


def pick(scores: torch.Tensor, noise: torch.Tensor | None) -> Ints:
    """The token of each row of scores; with its row of noise it is what `torch.multinomial` would draw."""
    if noise is None:
        best_tokens: Ints = scores.argmax(-1).cpu().numpy()
        return best_tokens
    chances, tokens = odds(scores, noise).max(-1)
    drawn: Ints = tokens.masked_fill(chances.isnan(), NO_TOKEN).cpu().numpy()
    check_drawn(drawn)
    return drawn


def check_drawn(tokens: Ints) -> None:
    if tokens.min() < 0:
        raise RequestError(
            "The scores to sample from hold no number: a logits processor forbids every token, or the logits are NaN."
        )


def scores_of_all(processors: LogitsProcessorList | None, logits: torch.Tensor) -> torch.Tensor:
    """What processors that look at the scores alone make of many rows, [rows, vocabulary], whatever text is before."""
    scores = logits.to(torch.float32, copy=True)
    if not processors:
        return scores
    made: torch.Tensor = processors(torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device), scores)
    return made


def pick_all(processors: LogitsProcessorList | None, draws: Draws, places: Ints, logits: torch.Tensor) -> Ints:
    """Draw after many rows in one call, [rows, vocabulary], with processors that look at the scores alone.

    `places` says which place of the output each row's token would take.
    """
    scores = scores_of_all(processors, logits)
    of_place = {place: draws.at(place, scores.shape[-1]) for place in dict.fromkeys(places.tolist())}
    return pick(scores, torch.stack([of_place[place] for place in places.tolist()]))


def shared(a: Seq[int], b: Seq[int]) -> int:
    """How many tokens two texts begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def first_difference(a: Seq[int], b: Seq[int]) -> int | None:
    """Where two outputs part; None if they are the same."""
    same = shared(a, b)
    return None if same == len(a) == len(b) else same


def margin_after(model: PreTrainedModel, ids: Seq[int]) -> float:
    """How far apart the two best logits after a text are: near nothing means that rounding decides."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1]
    two = logits.float().topk(2).values
    return float(two[0] - two[1])
