"""The public face: text at the edges, token ids inside."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookfar.choose import own_processors
from lookfar.config import Budget, Strategy, StrategySpec, check_budget, default_budget, parse_strategy
from lookfar.engine import Engine
from lookfar.errors import LookfarWarning, ModelError, RequestError
from lookfar.fallback import decode_plainly
from lookfar.memory import Memory
from lookfar.model import BoundModel
from lookfar.probe import verifies_trees
from lookfar.sequence import FinishReason, OnStep, OnTokens, Request, Sequence
from lookfar.stats import Stats
from lookfar.store import Store

Prompt = str | Seq[int]


@dataclass(frozen=True)
class Completion:
    """What came out of one prompt."""

    text: str  # without special tokens; empty when there is no tokenizer
    token_ids: list[int]  # as `model.generate` returns them, the stop token included
    finish_reason: FinishReason  # "stop" at a stop token, "length" at max_new_tokens
    stats: Stats


class LM:
    """A causal language model that decodes in fewer steps and returns what `model.generate` returns.

    `strategy` is "auto" by default, every source of guesses that pays, with as many rows a step as were measured to pay
    on this machine (`budget="auto"`). `pack` keeps a packed copy of the linear weights for faster steps; by default on
    a CPU in float32, if memory allows. `store` is a file of past texts to guess from; with `remember`, answers are kept
    for guessing later ones, in this process. The model is put into evaluation mode and otherwise left as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        strategy: StrategySpec = "auto",
        budget: Budget = None,
        pack: bool | None = None,
        store: str | os.PathLike[str] | None = None,
        remember: bool = True,
        max_batch: int = 8,
        max_length: int | None = None,
        prefill_rows: int = 512,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ModelError(
                f"LM takes a transformers model, not {type(model).__name__}: use lookfar.load for names and paths."
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.strategy = parse_strategy(strategy)
        check_budget(budget)
        self.budget = budget
        self.remember = remember
        bound = BoundModel(model, pack=pack)
        if bound.support.trees and not _is_stock(model) and not verifies_trees(bound):
            reason = "its code does not follow the mask, positions and cache it is given"
            bound.support = replace(bound.support, reason=reason)
        memory = Memory(bound.vocab_size, Store(bound.vocab_size, tokenizer))
        if store is not None:
            memory.store.load(store)
        self.engine = Engine(bound, max_batch, max_length, prefill_rows, memory)
        self._warned = False

    @property
    def device(self) -> torch.device:
        return self.engine.model.device

    @property
    def store(self) -> Store:
        """Past texts to guess from: `learn`, `save` and `load`."""
        return self.engine.memory.store

    def forget(self) -> None:
        """Forget what past requests left to guess from, and what was loaded into the store."""
        memory = self.engine.memory
        self.engine.memory = Memory(memory.vocab_size, Store(memory.vocab_size, self.tokenizer))

    @overload
    def generate(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int = ...,
        strategy: StrategySpec = ...,
        budget: Budget = ...,
        on_tokens: OnTokens | None = ...,
        on_step: OnStep | None = ...,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        max_new_tokens: int = ...,
        strategy: StrategySpec = ...,
        budget: Budget = ...,
        on_tokens: OnTokens | None = ...,
        on_step: OnStep | None = ...,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        strategy: StrategySpec = None,
        budget: Budget = None,
        on_tokens: OnTokens | None = None,
        on_step: OnStep | None = None,
    ) -> Completion | list[Completion]:
        """Decode one prompt (text or token ids), or a list of them, greedily.

        `strategy` and `budget` replace those given when the LM was made. `on_tokens(sequence, tokens)` is called after
        each step that gave a sequence new tokens, `on_step(sequence, rows, tokens, seconds)` with all that was fed too.
        """
        prompts, single = _as_prompts(prompt)
        strategies = self.strategy if strategy is None else parse_strategy(strategy)
        check_budget(budget)
        rows = budget or (self.budget if strategy is None else None) or default_budget(strategies)
        requests = [self._request(self.encode(p), max_new_tokens, strategies, rows) for p in prompts]
        completions = [self._completion(sequence) for sequence in self._run(requests, on_tokens, on_step)]
        return completions[0] if single else completions

    def chat(self, messages: Seq[Mapping[str, str]], **options: Any) -> Completion:
        """Answer a conversation, formatted with the tokenizer's chat template. Options as for `generate`."""
        return self.generate(self.chat_ids(messages), **options)

    def chat_ids(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for the model's answer."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer: pass one to lookfar.LM(model, tokenizer).")
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("This tokenizer has no chat template: use generate with a plain prompt.")
        if not messages or not all("role" in message and "content" in message for message in messages):
            raise RequestError('chat takes a list of messages like {"role": "user", "content": "Hello"}.')
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return _ids_of(self.tokenizer(text, add_special_tokens=False, verbose=False))

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, checked."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "A text prompt needs a tokenizer: pass one to LM(model, tokenizer), or give token ids."
                )
            prompt = _ids_of(self.tokenizer(prompt, verbose=False))
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            raise RequestError("A list of token ids holds whole numbers and nothing else.")
        ids = list(prompt)
        if not ids:
            raise RequestError("The prompt is empty: give at least one token.")
        vocab_size = self.engine.model.vocab_size
        if bad := [token for token in ids if not 0 <= token < vocab_size]:
            raise RequestError(f"Token id {bad[0]} is outside the vocabulary: ids go from 0 to {vocab_size - 1}.")
        return ids

    def _request(
        self, ids: list[int], max_new_tokens: int, strategies: tuple[Strategy, ...], budget: Budget
    ) -> Request:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}.")
        stop = self.model.generation_config.eos_token_id if self.model.can_generate() else None
        stop_ids = frozenset([stop] if isinstance(stop, int) else stop or ())
        request = Request(ids, max_new_tokens, stop_ids, strategies, budget=budget, remember=self.remember)
        self.engine.check(request)
        if self.engine.can_draft(request):
            return replace(request, processors=own_processors(self.model, ids, max_new_tokens))
        return request

    def _run(self, requests: list[Request], on_tokens: OnTokens | None, on_step: OnStep | None) -> list[Sequence]:
        """Decode with the engine what it can take, and the rest plainly with transformers."""
        plain = {i: request for i, request in enumerate(requests) if not self.engine.can_draft(request)}
        ours = [i for i in range(len(requests)) if i not in plain]
        run = self.engine.run([requests[i] for i in ours], on_tokens, on_step) if ours else []
        done = dict(zip(ours, run, strict=True))
        for i, request in plain.items():
            if request.strategies:
                self._warn(request)
            done[i] = decode_plainly(self.model, replace(request, strategies=()), i, self.engine.memory, on_tokens)
        return [done[i] for i in range(len(requests))]

    def _warn(self, request: Request) -> None:
        if self._warned:
            return
        self._warned = True
        support = self.engine.model.support
        why = support.reason or (
            f"{request.length} tokens reach past {support.tree_limit}, where its rotary scaling sets in"
        )
        message = f"{support.model_type} decodes plainly, without guesses: {why}."
        warnings.warn(message, LookfarWarning, stacklevel=4)

    def _completion(self, sequence: Sequence) -> Completion:
        output = sequence.output
        text = self.tokenizer.decode(output, skip_special_tokens=True) if self.tokenizer is not None else ""
        assert sequence.finish_reason is not None
        return Completion(str(text), output, sequence.finish_reason, sequence.stats)


def _as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """A prompt or a list of prompts → a list, and whether it was one."""
    if isinstance(prompt, str):
        return [prompt], True
    try:
        items = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    except TypeError:
        raise RequestError(
            f"A prompt is a text, a list of token ids, or a list of those, not {type(prompt).__name__}."
        ) from None
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items], True
    if all(isinstance(item, (str, list, tuple)) for item in items):
        return items, False
    raise RequestError("A list of prompts holds texts or lists of token ids, and nothing else.")


def _ids_of(encoded: Any) -> list[int]:
    ids: list[int] = encoded.input_ids
    return ids


def _is_stock(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("transformers.")
