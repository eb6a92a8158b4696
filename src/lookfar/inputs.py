"""Prompts of all kinds → prompts that can become requests: texts, token ids, processor outputs, conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lookfar.engine.prepared import PreparedPrompt, prepare_prompts
from lookfar.errors import RequestError, first_sentence
from lookfar.models.binding import BoundModel
from lookfar.prompts import Messages, as_prompts, chat_text, encode, has_media, ids_of, parts_of

TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")  # 0 is text


class PromptReader:
    """Reads the prompts for one model, with its tokenizer, and its processor if it has one."""

    def __init__(
        self, bound: BoundModel, tokenizer: PreTrainedTokenizerBase | None, processor: ProcessorMixin | None
    ) -> None:
        self._bound = bound
        self.tokenizer, self.processor = tokenizer, processor

    @property
    def _model(self) -> PreTrainedModel:
        return self._bound.model

    def read(self, prompt: Any) -> tuple[list[PreparedPrompt], bool]:
        """Return the prompts of a call, and whether it was a single one."""
        if isinstance(prompt, Mapping) and self._holds_media(prompt):
            return prepare_prompts(self._model, self._on_device(prompt), self._bound.vocab_size), False
        prompts, single = as_prompts(prompt)
        return [self._read_text(self.encode(one)) for one in prompts], single

    def encode(self, prompt: Any) -> list[int]:
        """Return the token ids of a text, or token ids, checked."""
        return encode(prompt, self.tokenizer, self._read_vocab_size)

    @property
    def _read_vocab_size(self) -> int:
        """The vocabulary of what is read: an encoder may have one of its own."""
        if not self._bound.support.encoder_decoder:
            return self._bound.vocab_size
        return int(self._model.get_encoder().get_input_embeddings().weight.shape[0])

    def _read_text(self, ids: list[int]) -> PreparedPrompt:
        if not self._bound.support.first_pass:
            return PreparedPrompt(ids)
        tensor = torch.tensor([ids], device=self._bound.device)
        given = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
        return prepare_prompts(self._model, given, self._bound.vocab_size)[0]

    def _holds_media(self, prompt: Mapping[str, Any]) -> bool:
        if not self._bound.support.takes_media:
            return False
        types = [torch.as_tensor(prompt[name]) for name in TYPE_INPUTS if name in prompt]
        return not prompt.keys() <= {"input_ids", "attention_mask", *TYPE_INPUTS} or any(map(torch.any, types))

    def _on_device(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a processor's outputs where the model is, numbers in its precision."""
        features = BatchFeature(dict(inputs), tensor_type="pt")
        return dict(features.to(self._bound.device, self._model.dtype))

    def chat(self, messages: Messages) -> Any:
        """Return a conversation as a prompt: token ids, or what the processor makes of its images, audio and video."""
        if not (self._bound.support.takes_media and has_media(messages)):
            return self.template_ids(self.chat_text(messages))
        if self.processor is None:
            raise RequestError("Images, audio and video need a processor: pass one to lookfar.LM(model, processor).")
        try:
            return self.processor.apply_chat_template(
                parts_of(messages), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
        except (ValueError, TypeError, OSError, KeyError, AttributeError, ImportError) as error:
            raise RequestError(f"The processor cannot take this conversation: {first_sentence(error)}.") from error

    def chat_text(self, messages: Messages) -> str:
        """Return a conversation in the chat template, ready for the model's answer."""
        if self.processor is not None and getattr(self.processor, "chat_template", None):
            return chat_text(messages, self.processor, as_parts=True)
        return chat_text(messages, self.tokenizer)

    def template_ids(self, text: str) -> list[int]:
        """Return the token ids of text that a chat template made, which has its own special tokens."""
        assert self.tokenizer is not None
        return ids_of(self.tokenizer(text, add_special_tokens=False, verbose=False))
