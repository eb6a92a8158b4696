"""Logits → tokens, as `model.generate(do_sample=False)` does it: processors on the place's own prefix, then argmax."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel

from lookfar.arrays import Floats, Int32s, Ints


def greedy(logits: torch.Tensor) -> Ints:
    """The choice of every row, [batch, rows]; one copy from the device."""
    # float32 even for float64 models: transformers compares the logits in float32.
    chosen: Ints = logits.float().argmax(-1).cpu().numpy().astype(np.int64)
    return chosen


def best(logits: torch.Tensor, count: int) -> tuple[Int32s, Floats]:
    """The `count` best tokens of every row and their logits, [batch, rows, count], best first."""
    values, ids = logits.float().topk(min(count, logits.shape[-1]), -1)
    return ids.to(torch.int32).cpu().numpy(), values.cpu().numpy()


def greedy_after(processors: LogitsProcessorList, prefix: Seq[int], logits: torch.Tensor) -> int:
    """The choice after `prefix` given the logits of its last row, [vocabulary]."""
    ids = torch.tensor([prefix], device=logits.device)
    scores = processors(ids, logits[None].to(torch.float32, copy=True))
    return int(scores.argmax(-1))


def first_difference(a: Seq[int], b: Seq[int]) -> int | None:
    """Where two outputs part; None if they are the same."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def margin_after(model: PreTrainedModel, ids: Seq[int]) -> float:
    """How far apart the two best logits after a text are: near nothing means that rounding decides."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def own_processors(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> LogitsProcessorList | None:
    """The processors that the model's own generation config asks for (a repetition penalty, say)."""
    if not model.can_generate():
        return None
    config, _ = model._prepare_generation_config(None, do_sample=False, max_new_tokens=max_new_tokens)
    model._prepare_special_tokens(config, device=model.device)
    config.max_length = len(prompt) + max_new_tokens
    if config.min_new_tokens:
        config.min_length = len(prompt) + config.min_new_tokens
    processors: LogitsProcessorList = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([prompt], device=model.device),
        device=str(model.device),
        model_kwargs={},
    )
    return processors or None
