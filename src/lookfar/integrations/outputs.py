"""Finished sequences → what `generate` returns, streams and leaves in a cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from lookfar.choose import scores_after
from lookfar.integrations.asked import Asked
from lookfar.sequence import Sequence


class Lockstep:
    """Feeds a streamer as `generate` does: one token of every sequence at a time."""

    def __init__(self, streamer: BaseStreamer, batch: int, pad: int) -> None:
        self.streamer = streamer
        self.pad = pad
        self.outputs: list[list[int]] = [[] for _ in range(batch)]
        self.finished = [False] * batch
        self.told = 0

    def __call__(self, sequence: Sequence, tokens: list[int]) -> None:
        self.outputs[sequence.index] += tokens
        self.finished[sequence.index] = sequence.finish_reason is not None
        waiting_for = [len(o) for o, done in zip(self.outputs, self.finished, strict=True) if not done]
        until = min(waiting_for, default=max(map(len, self.outputs)))
        for place in range(self.told, until):
            row = [output[place] if place < len(output) else self.pad for output in self.outputs]
            self.streamer.put(torch.tensor(row))
        self.told = max(self.told, until)


def pad_token(asked: Asked) -> int:
    pad = asked.config._pad_token_tensor
    return int(pad) if pad is not None else 0


def result(asked: Asked, done: list[Sequence]) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """What `generate` returns."""
    steps = max(len(sequence.output) for sequence in done)
    pad = pad_token(asked)
    new = [sequence.output + [pad] * (steps - len(sequence.output)) for sequence in done]
    ids = torch.cat([asked.input_ids, torch.tensor(new, device=asked.input_ids.device)], -1)
    logits = None
    if asked.returns_cache:
        logits = _fill_cache(asked, done, ids, steps)
    if not asked.config.return_dict_in_generate:
        return ids
    scores, raw = asked.config.output_scores, asked.config.output_logits
    if scores or raw:
        _score_padding(asked, done, ids, logits)
    return GenerateDecoderOnlyOutput(
        sequences=ids,
        scores=tuple(map(torch.stack, zip(*(s.scores for s in done), strict=True))) if scores else None,
        logits=tuple(map(torch.stack, zip(*(s.logits for s in done), strict=True))) if raw else None,
        past_key_values=asked.past,
    )


def _fill_cache(asked: Asked, done: list[Sequence], ids: torch.Tensor, steps: int) -> torch.Tensor | None:
    """Give the caller's cache the keys and values of all tokens but the last, as `generate` leaves it.

    Those of one sequence are copied. A padded batch is not in the engine as it is here, so its keys and values are made
    in one more forward, which also gives the logits of the last `steps` places.
    """
    cache = asked.past
    if cache is None:
        return None
    if done[0].exported is not None:
        for layer, (keys, values) in enumerate(done[0].exported):
            cache.update(keys, values, layer)
        return None
    return _forward(asked, ids[:, :-1], steps, cache)


def _forward(asked: Asked, ids: torch.Tensor, last: int, cache: DynamicCache) -> torch.Tensor:
    """The logits of the last places of a padded batch, [batch, last, vocabulary]."""
    model, inputs = asked.model, dict(asked.inputs)
    mask = inputs.get("attention_mask")
    given = asked.input_ids.shape[1]
    embeds = inputs.get("inputs_embeds")
    before = embeds.shape[1] if embeds is not None else given
    if mask is None:
        mask = torch.ones(len(ids), before, dtype=torch.long, device=ids.device)
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - given)], -1).to(model.device)
    feed: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
    if "position_ids" in inputs:
        feed["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if embeds is not None:
        new = model.get_input_embeddings()(ids[:, given:].to(model.device))
        feed["inputs_embeds"] = torch.cat([embeds, new.to(embeds)], 1)
    else:
        feed["input_ids"] = ids.to(model.device)
    if "logits_to_keep" in inputs:
        feed["logits_to_keep"] = last
    with torch.no_grad():
        logits: torch.Tensor = model(**feed, return_dict=True).logits
    return logits[:, -last:]


def _score_padding(asked: Asked, done: list[Sequence], ids: torch.Tensor, logits: torch.Tensor | None) -> None:
    """`generate` goes on with padding after a sequence that is done until all are, and reports its scores too."""
    steps = ids.shape[1] - asked.input_ids.shape[1]
    if all(len(sequence.output) == steps for sequence in done):
        return
    if logits is None:
        logits = _forward(asked, ids[:, :-1], steps, DynamicCache(config=asked.model.config.get_text_config()))
    for row, sequence in enumerate(done):
        for place in range(len(sequence.output), steps):
            own = logits[row, place].float().to(ids.device)
            text = ids[row, : asked.input_ids.shape[1] + place].tolist()
            if sequence.request.keep_scores:
                sequence.scores.append(scores_after(sequence.request.processors, text, own)[0])
            if sequence.request.keep_logits:
                sequence.logits.append(own)
