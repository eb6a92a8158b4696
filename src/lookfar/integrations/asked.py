"""What `generate` hands to its decoding loop → requests for the engine, or the reason why that cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationConfig, MaxLengthCriteria

from lookfar.config import Budget, Strategy
from lookfar.errors import CapacityError
from lookfar.generation import criteria_of_rows, split_criteria
from lookfar.lm import LM
from lookfar.noise import Draws, Noise
from lookfar.processors import of_row, second_forward
from lookfar.sequence import Request
from lookfar.structured import forced_by

UNDERSTOOD = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "logits_to_keep"}
UNKNOWN_TOKEN = 0  # stands for what was given as keys and values or as embeddings


class NotOursError(Exception):
    """Why transformers decodes a call itself."""


@dataclass(frozen=True)
class Asked:
    """A call of `generate`, after all its preparations."""

    model: PreTrainedModel
    input_ids: torch.Tensor  # [batch, length]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    inputs: dict[str, Any]  # for the model

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0]

    @property
    def past(self) -> Cache | None:
        return self.inputs.get("past_key_values")

    @property
    def past_length(self) -> int:
        return int(self.past.get_seq_length()) if self.past is not None else 0

    @property
    def returns_cache(self) -> bool:
        return self.config.return_dict_in_generate or getattr(self.past, "_is_user_defined", False)

    def requests(self, lm: LM, strategies: tuple[Strategy, ...], budget: Budget) -> list[Request]:
        """One request for each row."""
        stop_ids, criteria = split_criteria(self.criteria)
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        max_new_tokens = min(limits, default=0) - self.input_ids.shape[1]
        noise = Noise(self.batch, self.input_ids.device) if self.config.do_sample else None
        embeds = self.inputs.get("inputs_embeds")
        requests = []
        for row in range(self.batch):
            processors = of_row(self.processors, row, self.batch)
            if processors is None:
                raise NotOursError(
                    "a logits processor may look at the whole batch (`row_wise = True` on it says it does not)"
                )
            prompt, kept = self._prompt(row)
            request = Request(
                prompt,
                max_new_tokens,
                stop_ids,
                strategies + forced_by(processors) if strategies else (),
                budget=budget,
                remember=lm.remember and embeds is None and len(prompt) == int(kept.sum()),
                processors=processors or None,
                criteria=criteria or None,
                seen=self.input_ids[row].tolist(),
                draws=Draws(noise, row) if noise is not None else None,
                device=self.input_ids.device,
                keep_scores=bool(self.config.return_dict_in_generate and self.config.output_scores),
                keep_logits=bool(self.config.return_dict_in_generate and self.config.output_logits),
                embeds=embeds[row, kept] if embeds is not None else None,
                past=self.past if self.past_length else None,
                export=self.batch == 1 and self.returns_cache and bool(kept.all()),
            )
            requests.append(self._checked(lm, request))
        return requests

    def check_model(self) -> None:
        """Refuse a model that the engine should not even look at."""
        _unless(not self.model.config.is_encoder_decoder, "it is an encoder-decoder model")
        _unless(not self.model.training, "it is in training mode (model.eval() leaves that)")

    def check_call(self, lm: LM) -> None:
        """Refuse what the engine cannot do exactly."""
        config, support = self.config, lm.engine.model.support
        _unless(support.trees, support.reason or "")
        unknown = [k for k, v in self.inputs.items() if v is not None and k not in UNDERSTOOD]
        _unless(config.use_cache is not False, "use_cache is off")
        _unless(not config.is_assistant, "it drafts for another model")
        _unless(not (config.return_dict_in_generate and config.output_attentions), "attentions are asked for")
        _unless(not (config.return_dict_in_generate and config.output_hidden_states), "hidden states are asked for")
        _unless(not unknown, f"{', '.join(unknown)} cannot be fed together with guesses")
        _unless(not second_forward(self.processors), "classifier-free guidance runs the model twice for each token")
        alone = self.batch == 1
        _unless(
            criteria_of_rows(self.criteria, self.batch),
            "a stopping criterion may look at the whole batch (`row_wise = True` on it says it does not)",
        )
        ends_early = any(type(c) not in (EosTokenCriteria, MaxLengthCriteria) for c in self.criteria)
        padded = any(hasattr(c, "eos_token_id") for c in self.criteria)
        _unless(
            alone or padded or not ends_early, "rows of this batch stop early and there is no end token to pad with"
        )
        past = self.past
        _unless(past is None or (type(past) is DynamicCache and not past.offloading), "the cache is of a special kind")
        _unless(alone or not self.past_length, "a batch goes on from a cache")
        whole = not self.past_length or all(x.keys.shape[-2] == self.past_length for x in _layers(past))
        _unless(whole, "its cache keeps only a window of the text")

    def _checked(self, lm: LM, request: Request) -> Request:
        try:
            lm.engine.check(request)
        except CapacityError:
            raise NotOursError("the text may become longer than the model's positions") from None
        _unless(bool(request.prompt) and request.max_new_tokens > 0, "there is no prompt, or no room for an answer")
        if not lm.engine.can_draft(request):
            raise NotOursError(lm.why_plain(request))
        return request

    def _prompt(self, row: int) -> tuple[list[int], torch.Tensor]:
        """The tokens of a row without its padding, and which of the given places those are."""
        mask, embeds = self.inputs.get("attention_mask"), self.inputs.get("inputs_embeds")
        ids = self.input_ids[row]
        given = embeds.shape[1] if embeds is not None else len(ids)
        length = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", given)
        known = mask[row].bool() if mask is not None else torch.ones(length, dtype=torch.bool)
        # Either the whole text is given, or what follows the cached part of it.
        _unless(length in (given, given + self.past_length), "the attention mask does not fit the input")
        _unless(bool((known[1:] >= known[:-1]).all()), "the attention mask hides more than padding on the left")
        _unless(not self.past_length or bool(known.all()), "a padded text goes on from a cache")
        self._check_positions(row, known.cpu())
        kept = known[length - given :].to(ids.device)
        tokens = ids[kept].tolist() if len(ids) == given else [UNKNOWN_TOKEN] * int(kept.sum())
        prompt = [UNKNOWN_TOKEN] * (length - given) + tokens
        _unless(len(prompt) > self.past_length, "the cache already holds the whole text")
        return prompt, kept

    def _check_positions(self, row: int, known: torch.Tensor) -> None:
        """Positions are counted from the first token that is no padding."""
        positions = self.inputs.get("position_ids")
        if positions is None:
            return
        _unless(positions.ndim == 2, "its positions are not plain numbers")
        own = positions[row if len(positions) > 1 else 0].cpu()
        if len(own) == len(known):
            own, start = own[known], 0
        else:
            start = len(known) - len(own)
        _unless(torch.equal(own, torch.arange(start, start + len(own))), "its positions were given")


def _layers(cache: Cache | None) -> list[Any]:
    return [layer for layer in cache.layers if layer.is_initialized] if cache is not None else []


def _unless(fine: bool, reason: str) -> None:
    if not fine:
        raise NotOursError(reason)
