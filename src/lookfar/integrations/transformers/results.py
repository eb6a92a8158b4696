"""Finished requests → the outputs of `generate`: sequences, scores, streamed tokens, and the filled cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lookfar.engine.outputs import RequestResult, StepOutput
from lookfar.engine.request import Request
from lookfar.integrations.transformers.call import GenerateCall
from lookfar.models.first_forward import FirstForward, new_cache
from lookfar.models.time_steps import decoding
from lookfar.sampling.sampler import process


class LockstepStreamer:
    """Feeds a streamer as `generate` does: one token of every sequence at a time."""

    def __init__(self, streamer: BaseStreamer, batch: int, pad: int) -> None:
        self.streamer = streamer
        self.pad = pad
        self.outputs: list[list[int]] = [[] for _ in range(batch)]
        self.finished = [False] * batch
        self.done = 0  # tokens of every sequence that the streamer has got

    def __call__(self, output: StepOutput) -> None:
        self.outputs[output.index] += output.tokens
        self.finished[output.index] = output.is_last
        going_on = [len(o) for o, done in zip(self.outputs, self.finished, strict=True) if not done]
        until = min(going_on, default=max(map(len, self.outputs)))
        for place in range(self.done, until):
            row = [output[place] if place < len(output) else self.pad for output in self.outputs]
            self.streamer.put(torch.tensor(row))
        self.done = max(self.done, until)


def build_result(
    call: GenerateCall, requests: list[Request], results: list[RequestResult]
) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """Return token ids, or a dictionary with scores, logits and cache if the call asks for one."""
    steps = max(len(result.token_ids) for result in results)
    new = [result.token_ids + [call.pad_token] * (steps - len(result.token_ids)) for result in results]
    ids = torch.cat([call.input_ids, torch.tensor(new, device=call.input_ids.device)], -1)
    logits = None
    first = requests[0].kv.first.call if requests[0].kv.first is not None else None
    if call.returns_cache and call.past is not None:
        logits = _fill_cache(call, results, ids, first)
    if not call.config.return_dict_in_generate:
        return ids
    scores, raw = call.config.output_scores, call.config.output_logits
    if scores or raw:
        _add_padding_scores(call, requests, results, ids, logits, first)
    kind = GenerateEncoderDecoderOutput if call.has_encoder else GenerateDecoderOnlyOutput
    return kind(
        sequences=ids,
        scores=tuple(map(torch.stack, zip(*(r.scores for r in results), strict=True))) if scores else None,
        logits=tuple(map(torch.stack, zip(*(r.logits for r in results), strict=True))) if raw else None,
        past_key_values=call.past,
    )


def _fill_cache(
    call: GenerateCall, results: list[RequestResult], ids: torch.Tensor, first: FirstForward | None
) -> torch.Tensor | None:
    """Give the caller's cache the KV of all tokens but the last, as `generate` leaves it.

    The KV of one sequence is copied. The engine stores no padding, so the KV of a padded batch is computed in one
    more forward pass, which also gives the logits of all emitted tokens. So is that of a decoder with its source.
    """
    cache: Any = call.past
    if results[0].exported is not None:
        for layer, kv in enumerate(results[0].exported.layers):
            if kv is not None:
                cache.update(*kv[:2], layer)
                if len(kv) > 2:
                    cache.update_indexer(kv[2][:, 0], layer)
        return None
    return _all_logits(call, ids, cache, first)


def _all_logits(call: GenerateCall, ids: torch.Tensor, cache: Any, first: FirstForward | None) -> torch.Tensor:
    """Return the logits of all emitted tokens, [batch, tokens, vocabulary], and fill a cache."""
    if first is None:
        return _forward(call, ids[:, :-1], ids.shape[1] - call.input_ids.shape[1], cache)
    return first.replay(cache, ids[:, call.input_ids.shape[1] : -1])


def _forward(call: GenerateCall, ids: torch.Tensor, last: int, cache: DynamicCache) -> torch.Tensor:
    """Return the logits of the last places of a padded batch, [batch, last, vocabulary].

    Prompt and answer are passes of their own: what eager attention writes for padding depends on the pass's width.
    """
    model, inputs = call.model, dict(call.inputs)
    mask = inputs.get("attention_mask")
    given = call.input_ids.shape[1]
    embeds = inputs.get("inputs_embeds")
    before = embeds.shape[1] if embeds is not None else given
    if mask is None:
        mask = torch.ones(len(ids), before, dtype=torch.long, device=ids.device)
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - given)], -1).to(model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    prompt: dict[str, Any] = {"input_ids": ids[:, :given].to(model.device)}
    if embeds is not None:
        prompt = {"inputs_embeds": embeds}
    answer: dict[str, Any] = {"input_ids": ids[:, given:].to(model.device)}
    logits = []
    for start, end, feed in ((0, before, prompt), (before, mask.shape[1], answer)):
        if start == end:
            continue
        name = "cache_params" if "cache_params" in inputs else "past_key_values"
        feed |= {"attention_mask": mask[:, :end], name: cache, "use_cache": True}
        if "position_ids" in inputs:
            feed["position_ids"] = positions[:, start:end]
        if "logits_to_keep" in inputs:
            feed["logits_to_keep"] = min(last, end - start)
        with torch.no_grad(), decoding() if start else nullcontext():
            logits.append(model(**feed, return_dict=True).logits)
    return torch.cat(logits, 1)[:, -last:]


def _add_padding_scores(
    call: GenerateCall,
    requests: list[Request],
    results: list[RequestResult],
    ids: torch.Tensor,
    logits: torch.Tensor | None,
    first: FirstForward | None,
) -> None:
    """Add the scores of padding: `generate` goes on after a finished sequence until all are, and reports them too."""
    steps = ids.shape[1] - call.input_ids.shape[1]
    if all(len(result.token_ids) == steps for result in results):
        return
    if logits is None:
        cache = DynamicCache(config=call.model.config.get_text_config()) if first is None else new_cache(call.model)
        logits = _all_logits(call, ids, cache, first)
    for row, (request, result) in enumerate(zip(requests, results, strict=True)):
        for place in range(len(result.token_ids), steps):
            own = logits[row, place].float().to(ids.device)
            text = ids[row, : call.input_ids.shape[1] + place].tolist()
            if request.sampling.keep_scores:
                result.scores.append(process(request.sampling.processors, text, own)[0])
            if request.sampling.keep_logits:
                result.logits.append(own)
