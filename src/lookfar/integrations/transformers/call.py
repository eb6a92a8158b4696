"""A call of `generate` → requests for the engine, or the reason why the engine cannot take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import EosTokenCriteria, GenerationConfig, MaxLengthCriteria

from lookfar.drafters.base import Strategy
from lookfar.drafters.grammar import forced_text
from lookfar.engine.prepared import UNKNOWN_TOKEN, source_tokens
from lookfar.engine.request import FirstPass, KVOptions, Request
from lookfar.errors import CapacityError, ConfigError
from lookfar.kvcache.recurrent import holds_state
from lookfar.lm import LM
from lookfar.models.first_forward import FirstForward, ends_with_image
from lookfar.models.support import takes_media
from lookfar.sampling.noise import RandomStream, SamplingNoise
from lookfar.sampling.params import are_row_wise, split_criteria
from lookfar.sampling.processors import processors_for_row, runs_second_forward
from lookfar.sampling.sampler import SamplingParams
from lookfar.speculation.row_budget import Budget

SUPPORTED_INPUTS = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "logits_to_keep"}
SUPPORTED_INPUTS |= {"cache_params"}  # the cache of models without attention
TOKENIZERS = {"tokenizer", "assistant_tokenizer"}  # not for the model: criteria were made with them
SUPPORTED_INPUTS |= TOKENIZERS
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}  # of multimodal models: 0 is text


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
    encoder_input: torch.Tensor | None = None  # what an encoder has read: token ids, or audio

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0]

    @property
    def has_encoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def text_mask(self) -> torch.Tensor | None:
        """The mask of `input_ids`, which an encoder-decoder model decodes from."""
        return self.inputs.get("decoder_attention_mask" if self.has_encoder else "attention_mask")

    @property
    def embeds(self) -> torch.Tensor | None:
        """What the prompts are fed as, if not as token ids."""
        return self.inputs.get("inputs_embeds") if not self.has_encoder else None

    @property
    def past(self) -> Cache | None:
        return self.inputs.get("past_key_values", self.inputs.get("cache_params"))

    @property
    def text_past(self) -> Cache | None:
        """The part of the cache that holds the decoded text."""
        return self.past.self_attention_cache if isinstance(self.past, EncoderDecoderCache) else self.past

    @property
    def past_length(self) -> int:
        past = self.text_past
        attention = past is not None and any(isinstance(layer, CacheLayerMixin) for layer in past.layers)
        return int(past.get_seq_length()) if past is not None and attention else 0

    @property
    def is_recurrent(self) -> bool:
        """Whether the cache holds recurrent states."""
        return self.text_past is not None and any(holds_state(layer) for layer in self.text_past.layers)

    @property
    def returns_cache(self) -> bool:
        return self.config.return_dict_in_generate or getattr(self.past, "_is_user_defined", False)

    @property
    def exports_cache(self) -> bool:
        """Whether the KV of a single sequence is copied to the caller's cache; otherwise it is computed again."""
        return self.returns_cache and not (self.is_recurrent or self.has_encoder)

    @property
    def pad_token(self) -> int:
        pad = self.config._pad_token_tensor
        return int(pad) if pad is not None else 0

    @cached_property
    def media(self) -> list[str]:
        """The inputs that only a first forward pass can take: images, audio, video, and what describes them."""
        if self.has_encoder:
            return []
        ignored = SUPPORTED_INPUTS
        if takes_media(self.model.config, type(self.model)):
            ignored = ignored | {name for name in TOKEN_TYPES if not torch.as_tensor(self.inputs.get(name, 0)).any()}
        return [name for name, value in self.inputs.items() if name not in ignored and value not in (None, {})]

    def requests(self, lm: LM, strategies: tuple[Strategy, ...], budget: Budget) -> list[Request]:
        """Return one request for each row."""
        stop_ids, criteria = split_criteria(self.criteria)
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        max_new_tokens = min(limits, default=0) - self.input_ids.shape[1]
        noise = SamplingNoise(self.batch, self.input_ids.device) if self.config.do_sample else None
        prompts = [self._prompt(row) for row in range(self.batch)]
        first = self._first_forward([kept for _, kept in prompts]) if self.needs_first_pass(lm) else None
        requests = []
        counted = lm.engine.runner.model.support.counts_padding
        for row, (prompt, kept) in enumerate(prompts):
            _require(not counted or bool(kept.all()), "padding shifts its positions")
            sampling, source = self._sampling(row, noise), self._source(row, lm)
            request = Request(
                source + prompt,
                max_new_tokens,
                stop_ids,
                strategies + forced_text(sampling.processors or ()) if strategies else (),
                budget,
                lm.remember and self.embeds is None and len(prompt) == int(kept.sum()),
                criteria or None,
                sampling,
                self._kv_options(kept, row, FirstPass(first, row, len(source)) if first is not None else None),
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

    def needs_first_pass(self, lm: LM) -> bool:
        """Whether transformers has to run the prompts."""
        return bool(self.media) or lm.engine.runner.model.support.first_pass

    def _first_forward(self, kept: list[torch.Tensor]) -> FirstForward:
        inputs = {name: value for name, value in self.inputs.items() if name not in TOKENIZERS}
        return FirstForward(self.model, self.input_ids, inputs, [int((~row).sum()) for row in kept])

    def _source(self, row: int, lm: LM) -> list[int]:
        """Return the tokens that the encoder has read, if the decoder has the same ones: answers may copy them."""
        read, mask = self.encoder_input, self.inputs.get("attention_mask")
        if not self.has_encoder or read is None:
            return []
        own = read[row * len(read) // self.batch]  # several sequences may be asked for
        of_row = mask[row] if mask is not None else None
        return source_tokens(self.model, own, of_row, lm.engine.runner.model.vocab_size)

    def _kv_options(self, kept: torch.Tensor, row: int, first: FirstPass | None) -> KVOptions:
        embeds = self.embeds
        return KVOptions(
            embeds=embeds[row, kept] if embeds is not None else None,
            past=self.past if self.past_length else None,
            first=first,
            export=self.batch == 1 and bool(kept.all()) and self.exports_cache,
        )

    def check_model(self) -> None:
        """Refuse a model that the engine should not even bind."""
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
        _require(config.use_cache is not False, "use_cache is off")
        _require(not (config.return_dict_in_generate and config.output_attentions), "attentions are asked for")
        _require(not (config.return_dict_in_generate and config.output_hidden_states), "hidden states are asked for")
        _require(
            not self.media or support.takes_media, f"{', '.join(self.media)} cannot be fed together with draft tokens"
        )
        if self.has_encoder:
            self._check_encoder()
        elif self.needs_first_pass(lm):
            self._check_first_pass()
        _require(
            not runs_second_forward(self.processors), "classifier-free guidance runs the model twice for each token"
        )
        self._check_batch()
        self._check_cache()
        reason = lm.why_call_falls_back()
        _require(not reason, reason)

    def _check_first_pass(self) -> None:
        _require(not self.past_length, "a prompt with images or audio continues from past_key_values")
        _require(self.embeds is None, "images or audio come together with inputs_embeds")
        _require(not ends_with_image(self.inputs.get("position_ids")), "the prompt ends with an image")

    def _check_encoder(self) -> None:
        known = SUPPORTED_INPUTS | {"encoder_outputs", "decoder_attention_mask"}
        unknown = [name for name, value in self.inputs.items() if name not in known and value is not None]
        _require(not unknown, f"{', '.join(unknown)} cannot be fed together with draft tokens")
        _require(not self.past_length, "an encoder-decoder model continues from past_key_values")
        _require(self.text_mask is None or bool(self.text_mask.all()), "decoder_attention_mask hides tokens")

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
        past = self.text_past
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
        mask, embeds = self.text_mask, self.embeds
        ids = self.input_ids[row]
        given = embeds.shape[1] if embeds is not None else len(ids)
        length = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", given)
        known = mask[row].bool() if mask is not None else torch.ones(length, dtype=torch.bool)
        # Either the whole text is given, or what follows the cached part of it.
        _require(length in (given, given + self.past_length), "the attention mask does not fit the input")
        _require(bool((known[1:] >= known[:-1]).all()), "the attention mask hides more than padding on the left")
        _require(not self.past_length or bool(known.all()), "a padded text continues from past_key_values")
        if not self.media:
            self._check_positions(row, known.cpu())
        kept = known[length - given :].to(ids.device)
        if self.media:
            vocab_size = self.model.get_input_embeddings().weight.shape[0]
            ids = ids.masked_fill(ids >= vocab_size, UNKNOWN_TOKEN)
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
        if positions.ndim == 3:  # of a multimodal model: one row for each kind, all equal for text
            same = bool((positions == positions[0]).all())
            _require(same, "position_ids are not the default ones")
            positions = positions[0]
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
