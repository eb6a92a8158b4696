"""A call of `generate` → requests for the engine, or the reason why the engine cannot take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import EosTokenCriteria, GenerationConfig, MaxLengthCriteria

from lookfar.drafters.base import Strategy
from lookfar.drafters.grammar import forced_text
from lookfar.engine.request import KVOptions, Request
from lookfar.errors import CapacityError, ConfigError
from lookfar.kvcache.recurrent import holds_state
from lookfar.lm import LM
from lookfar.sampling.noise import RandomStream, SamplingNoise
from lookfar.sampling.params import are_row_wise, split_criteria
from lookfar.sampling.processors import processors_for_row, runs_second_forward
from lookfar.sampling.sampler import SamplingParams
from lookfar.speculation.row_budget import Budget

SUPPORTED_INPUTS = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "logits_to_keep"}
SUPPORTED_INPUTS |= {"cache_params"}  # the cache of models without attention
SUPPORTED_INPUTS |= {"tokenizer", "assistant_tokenizer"}  # not for the model: criteria were made with them
UNKNOWN_TOKEN = 0  # stands for tokens that were given as KV or as embeddings


class UnsupportedCall(Exception):  # noqa: N818
    """A call that is left to transformers; the message is the reason, empty if none needs to be given."""


@dataclass(frozen=True)
class GenerateCall:
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
        return self.inputs.get("past_key_values", self.inputs.get("cache_params"))

    @property
    def past_length(self) -> int:
        attention = any(isinstance(layer, CacheLayerMixin) for layer in self.past.layers) if self.past else False
        return int(self.past.get_seq_length()) if self.past is not None and attention else 0

    @property
    def is_recurrent(self) -> bool:
        """Whether the cache holds recurrent states."""
        return self.past is not None and any(holds_state(layer) for layer in self.past.layers)

    @property
    def returns_cache(self) -> bool:
        return self.config.return_dict_in_generate or getattr(self.past, "_is_user_defined", False)

    @property
    def pad_token(self) -> int:
        pad = self.config._pad_token_tensor
        return int(pad) if pad is not None else 0

    def requests(self, lm: LM, strategies: tuple[Strategy, ...], budget: Budget) -> list[Request]:
        """Return one request for each row."""
        stop_ids, criteria = split_criteria(self.criteria)
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        max_new_tokens = min(limits, default=0) - self.input_ids.shape[1]
        noise = SamplingNoise(self.batch, self.input_ids.device) if self.config.do_sample else None
        requests = []
        for row in range(self.batch):
            prompt, kept = self._prompt(row)
            counted = lm.engine.runner.model.support.counts_padding
            _require(not counted or bool(kept.all()), "padding shifts its positions")
            sampling = self._sampling(row, noise)
            request = Request(
                prompt,
                max_new_tokens,
                stop_ids,
                strategies + forced_text(sampling.processors or ()) if strategies else (),
                budget,
                lm.remember and self.inputs.get("inputs_embeds") is None and len(prompt) == int(kept.sum()),
                criteria or None,
                sampling,
                self._kv_options(row, kept),
                lm.draft_state,
            )
            requests.append(self._checked(lm, request))
        return requests

    def _sampling(self, row: int, noise: SamplingNoise | None) -> SamplingParams:
        processors = processors_for_row(self.processors, row, self.batch)
        if processors is None:
            raise UnsupportedCall(
                "a logits processor may read the whole batch (`row_wise = True` on it says that it does not)"
            )
        returns = self.config.return_dict_in_generate
        return SamplingParams(
            processors or None,
            RandomStream(noise, row) if noise is not None else None,
            context=self.input_ids[row].tolist(),
            device=self.input_ids.device,
            keep_scores=bool(returns and self.config.output_scores),
            keep_logits=bool(returns and self.config.output_logits),
        )

    def _kv_options(self, row: int, kept: torch.Tensor) -> KVOptions:
        embeds = self.inputs.get("inputs_embeds")
        return KVOptions(
            embeds=embeds[row, kept] if embeds is not None else None,
            past=self.past if self.past_length else None,
            export=self.batch == 1 and self.returns_cache and bool(kept.all()) and not self.is_recurrent,
        )

    def check_model(self) -> None:
        """Refuse a model that the engine should not even bind."""
        _require(not self.model.config.is_encoder_decoder, "it is an encoder-decoder model")
        _require(not self.model.training, "it is in training mode (model.eval() leaves it)")
        _require(not self.config.is_assistant)  # an assistant is not meant to be accelerated
        ids = self.input_ids
        _require(
            ids.ndim == 2 and ids.shape[0] > 0 and not ids.is_floating_point(), "the input is no batch of token ids"
        )

    def check(self, lm: LM) -> None:
        """Refuse calls that the engine cannot decode exactly."""
        config, support = self.config, lm.engine.runner.model.support
        _require(support.drafts, support.reason)
        unknown = [k for k, v in self.inputs.items() if v is not None and k not in SUPPORTED_INPUTS]
        _require(config.use_cache is not False, "use_cache is off")
        _require(not (config.return_dict_in_generate and config.output_attentions), "attentions are asked for")
        _require(not (config.return_dict_in_generate and config.output_hidden_states), "hidden states are asked for")
        _require(not unknown, f"{', '.join(unknown)} cannot be fed together with draft tokens")
        _require(
            not runs_second_forward(self.processors), "classifier-free guidance runs the model twice for each token"
        )
        self._check_batch()
        self._check_cache()
        reason = lm.why_call_falls_back()
        _require(not reason, reason)

    def _check_batch(self) -> None:
        _require(
            are_row_wise(self.criteria, self.batch),
            "a stopping criterion may read the whole batch (`row_wise = True` on it says that it does not)",
        )
        ends_early = any(type(c) not in (EosTokenCriteria, MaxLengthCriteria) for c in self.criteria)
        padded = any(hasattr(c, "eos_token_id") for c in self.criteria)
        _require(
            self.batch == 1 or padded or not ends_early,
            "rows of this batch stop early and there is no end token to pad with",
        )

    def _check_cache(self) -> None:
        past = self.past
        _require(past is None or (type(past) is DynamicCache and not past.offloading), "the cache type is unsupported")
        _require(self.batch == 1 or not self.past_length, "a batch continues from past_key_values")
        if self.is_recurrent and past is not None:
            begun = any(holds_state(layer) and any(layer.has_previous_state.values()) for layer in past.layers)
            _require(not (begun or self.past_length), "it continues from a recurrent state")
            return
        layers = [layer for layer in past.layers if layer.is_initialized] if past is not None else []
        whole = not self.past_length or all(layer.keys.shape[-2] == self.past_length for layer in layers)
        _require(whole, "its cache keeps only a window of the text")

    def _checked(self, lm: LM, request: Request) -> Request:
        try:
            lm.engine.check(request)
        except CapacityError:
            raise UnsupportedCall("the text may become longer than the model's positions") from None
        except ConfigError as error:
            if request.kv.embeds is None:
                raise
            raise UnsupportedCall(str(error).rstrip(".")) from None
        _require(request.max_new_tokens > 0, "there is no room for an answer")
        if reason := lm.why_request_falls_back(request):
            raise UnsupportedCall(reason)
        return request

    def _prompt(self, row: int) -> tuple[list[int], torch.Tensor]:
        """Return the tokens of a row without its padding, and a mask of the places that are not padding."""
        mask, embeds = self.inputs.get("attention_mask"), self.inputs.get("inputs_embeds")
        ids = self.input_ids[row]
        given = embeds.shape[1] if embeds is not None else len(ids)
        length = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", given)
        known = mask[row].bool() if mask is not None else torch.ones(length, dtype=torch.bool)
        # Either the whole text is given, or what follows the cached part of it.
        _require(length in (given, given + self.past_length), "the attention mask does not fit the input")
        _require(bool((known[1:] >= known[:-1]).all()), "the attention mask hides more than padding on the left")
        _require(not self.past_length or bool(known.all()), "a padded text continues from past_key_values")
        self._check_positions(row, known.cpu())
        kept = known[length - given :].to(ids.device)
        tokens = ids[kept].tolist() if len(ids) == given else [UNKNOWN_TOKEN] * int(kept.sum())
        prompt = [UNKNOWN_TOKEN] * (length - given) + tokens
        _require(bool(prompt), "a prompt has no tokens")
        _require(len(prompt) > self.past_length, "the cache already holds the whole text")
        return prompt, kept

    def _check_positions(self, row: int, known: torch.Tensor) -> None:
        """Require positions that are counted from the first token that is no padding."""
        positions = self.inputs.get("position_ids")
        if positions is None:
            return
        _require(positions.ndim == 2, "position_ids are not [batch, length]")
        own = positions[row if len(positions) > 1 else 0].cpu()
        if len(own) == len(known):
            own, start = own[known], 0
        else:
            start = len(known) - len(own)
        _require(torch.equal(own, torch.arange(start, start + len(own))), "position_ids are not the default ones")


def _require(fine: bool, reason: str = "") -> None:
    """Leave a call to transformers, with a warning if there is a reason to give."""
    if not fine:
        raise UnsupportedCall(reason)
