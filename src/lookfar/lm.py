"""The public face: text at the edges, token ids inside."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Mapping, Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookfar.config import Budget, Strategy, StrategySpec, check_budget, default_budget, parse_strategy
from lookfar.engine import Engine
from lookfar.errors import LookfarWarning, ModelError, RequestError
from lookfar.fallback import decode_plainly, stream_plainly
from lookfar.generation import rules_for
from lookfar.gpu import steps_for
from lookfar.memory import Memory
from lookfar.model import BoundModel
from lookfar.noise import Draws, Noise
from lookfar.probe import verifies_trees
from lookfar.sequence import FinishReason, OnStep, OnTokens, Request, Sequence
from lookfar.stats import Stats
from lookfar.store import Store
from lookfar.structured import forced_by
from lookfar.text import GrowingText

Prompt = str | Seq[int]


@dataclass(frozen=True)
class Completion:
    """What came out of one prompt."""

    text: str  # without special tokens; empty when there is no tokenizer
    token_ids: list[int]  # as `model.generate` returns them, the stop token included
    finish_reason: FinishReason  # "stop" at a stop token, stop string or criterion, "length" at max_new_tokens
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """What one step added to one answer."""

    text: str  # complete characters only; the pieces add up to the text of the completion
    token_ids: list[int]
    sources: list[str]  # who guessed each token; "model" for the one that the step decoded itself
    step: int  # counted from 1
    index: int  # which prompt of a list
    finish_reason: FinishReason | None  # set in the last chunk of an answer
    stats: Stats  # so far


class LM:
    """A causal language model that decodes in fewer steps and returns what `model.generate` returns.

    `strategy` is "auto" by default, every source of guesses that pays, with as many rows a step as were measured to pay
    on this machine (`budget="auto"`). `pack` keeps a packed copy of the linear weights for faster steps; by default on
    a CPU in float32, if memory allows. On a CUDA device steps are captured as graphs where the model allows it
    (`capture=None`); `compile` runs its layers through `torch.compile` under them, and `exact` makes the text
    independent of what was guessed to the last bit, in half precision too (docs/gpu.md). `store` is a file of past
    texts to guess from; with `remember`, answers are kept for guessing later ones, in this process. The model is put
    into evaluation mode and otherwise left as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        strategy: StrategySpec = "auto",
        budget: Budget = None,
        pack: bool | None = None,
        capture: bool | None = None,
        compile: bool = False,
        exact: bool = False,
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
        steps = steps_for(bound, capture, compile, exact)
        self.engine = Engine(bound, max_batch, max_length, prefill_rows, memory, steps=steps)
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
        self.engine.memory = self.empty_memory()

    def empty_memory(self) -> Memory:
        """What a fresh LM starts with."""
        vocab_size = self.engine.model.vocab_size
        return Memory(vocab_size, Store(vocab_size, self.tokenizer))

    @overload
    def generate(self, prompt: str | list[int], **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Any) -> list[Completion]: ...

    def generate(
        self,
        prompt: Any,
        *,
        on_tokens: OnTokens | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Decode one prompt (text or token ids), or a list of them; greedily, unless an option asks for sampling.

        Options are those of `requests`: `max_new_tokens`, `strategy`, `seed`, … and every generation argument of
        transformers. `on_tokens(sequence, tokens)` is called after each step that gave a sequence new tokens,
        `on_step(sequence, rows, tokens, seconds)` with all that was fed too.
        """
        requests, single = self.requests(prompt, **options)
        done = self._run(requests, on_tokens, on_step)
        settle(requests, [len(sequence.output) for sequence in done])
        completions = [self._completion(sequence) for sequence in done]
        return completions[0] if single else completions

    def stream(self, prompt: Any, **options: Any) -> Generator[Chunk, None, None]:
        """Decode as `generate` does, and yield what each step adds. Who stops reading (or closes it) ends the answer.

        Chunks of several prompts come mixed, with the `index` of their prompt.
        """
        requests, _ = self.requests(prompt, **options)
        return self._stream(requests)

    def chat(self, messages: Seq[Mapping[str, str]], **options: Any) -> Completion:
        """Answer a conversation, formatted with the tokenizer's chat template. Options as for `generate`."""
        return self.generate(self.chat_ids(messages), **options)

    def chat_ids(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for the model's answer."""
        return self.template_ids(self.chat_text(messages))

    def chat_text(self, messages: Seq[Mapping[str, str]]) -> str:
        """A conversation in the tokenizer's chat template, ready for the model's answer."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer: pass one to lookfar.LM(model, tokenizer).")
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("This tokenizer has no chat template: use generate with a plain prompt.")
        if not messages or not all("role" in message and "content" in message for message in messages):
            raise RequestError('chat takes a list of messages like {"role": "user", "content": "Hello"}.')
        return str(self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))

    def template_ids(self, text: str) -> list[int]:
        """The token ids of text that a chat template made, which brings its own special tokens."""
        assert self.tokenizer is not None
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

    def requests(
        self,
        prompt: Any,
        *,
        max_new_tokens: int | None = None,
        strategy: StrategySpec = None,
        budget: Budget = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        reuse: bool = False,
        **arguments: Any,
    ) -> tuple[list[Request], bool]:
        """What is asked of the engine for a prompt or a list of them, and whether it was one prompt.

        `strategy` and `budget` replace those given when the LM was made. With sampling, `seed` or a `generator` gives
        the tokens that `model.generate` gives after `torch.manual_seed(seed)`; without either, torch's own generator
        is used and left as `generate` would leave it. `reuse` starts from the keys and values that an earlier answer
        left behind, where the prompt goes on from its text. `json_schema`, `regex` or `grammar` (Lark) constrain the
        answer; `presence_penalty` and `frequency_penalty` lower tokens that it already holds. All other arguments are
        those of `model.generate`.
        """
        prompts, single = _as_prompts(prompt)
        strategies, rows = self.how_to_guess(strategy, budget)
        if max_new_tokens is None and arguments.get("max_length") is None:
            max_new_tokens = 128
        if seed is not None and generator is not None:
            raise RequestError("Give a seed or a generator, not both.")
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise RequestError(f"seed must be a whole number, not {seed!r}.")
            generator = torch.Generator(self.device).manual_seed(seed)
        noise: Noise | None = None
        requests = []
        for i, one in enumerate(prompts):
            ids = self.encode(one)
            asked = arguments | {"max_new_tokens": max_new_tokens}
            rules = rules_for(self.model, self.tokenizer, ids, asked, i, len(prompts))
            if rules.do_sample and noise is None:
                noise = Noise(len(prompts), self.device, generator)
            request = Request(
                ids,
                rules.max_new_tokens,
                rules.stop_ids,
                strategies + forced_by(rules.processors or ()) if strategies else (),
                budget=rows,
                remember=self.remember,
                processors=rules.processors,
                criteria=rules.criteria,
                draws=Draws(noise, i) if noise is not None else None,
                reuse=reuse,
            )
            self.engine.check(request)
            requests.append(request)
        return requests, single

    def how_to_guess(self, strategy: StrategySpec, budget: Budget) -> tuple[tuple[Strategy, ...], Budget]:
        """The strategies and the budget of a call; what it leaves open is as it was when the LM was made."""
        strategies = self.strategy if strategy is None else parse_strategy(strategy)
        check_budget(budget)
        return strategies, budget or (self.budget if strategy is None else None) or default_budget(strategies)

    def _run(self, requests: list[Request], on_tokens: OnTokens | None, on_step: OnStep | None) -> list[Sequence]:
        """Decode with the engine what it can take, and the rest plainly with transformers."""
        ours, plain = self._split(requests)
        run = self.engine.run([requests[i] for i in ours], on_tokens, on_step) if ours else []
        done = dict(zip(ours, run, strict=True))
        for i in plain:
            request = replace(requests[i], strategies=())
            done[i] = decode_plainly(self.model, request, i, self.engine.memory, on_tokens)
        return [done[i] for i in range(len(requests))]

    def _stream(self, requests: list[Request]) -> Generator[Chunk, None, None]:
        ours, plain = self._split(requests)
        texts = [GrowingText(self.tokenizer) for _ in requests]
        lengths = [0] * len(requests)

        def chunk(sequence: Sequence, index: int, tokens: list[int], sources: list[str]) -> Chunk:
            lengths[index] += len(tokens)
            text = texts[index].add(tokens)
            if sequence.finish_reason is not None:
                text += texts[index].end()
            stats = sequence.stats
            return Chunk(text, tokens, sources, stats.steps, index, sequence.finish_reason, stats)

        try:
            if ours:
                with closing(self.engine.stream([requests[i] for i in ours])) as steps:
                    for done in steps:
                        yield chunk(done.sequence, ours[done.sequence.index], done.tokens, done.sources)
            for i in plain:
                request = replace(requests[i], strategies=())
                with closing(stream_plainly(self.model, request, i, self.engine.memory)) as news:
                    for sequence, tokens in news:
                        yield (last := chunk(sequence, i, tokens, ["model"]))
                if last.finish_reason is None:  # ended by a criterion, which is known after the token only
                    yield chunk(sequence, i, [], [])
        finally:
            settle(requests, lengths)

    def _split(self, requests: list[Request]) -> tuple[list[int], list[int]]:
        """Which requests the engine can take, and which transformers decodes."""
        ours = [i for i, request in enumerate(requests) if self.engine.can_draft(request)]
        plain = [i for i in range(len(requests)) if i not in ours]
        for i in plain:
            if requests[i].strategies:
                self._warn(requests[i])
        return ours, plain

    def why_plain(self, request: Request) -> str:
        """Why the engine cannot take a request."""
        support = self.engine.model.support
        return support.reason or (
            f"{request.length} tokens reach past {support.tree_limit}, where its rotary scaling sets in"
        )

    def _warn(self, request: Request) -> None:
        if not self._warned:
            self._warned = True
            name = self.engine.model.support.model_type
            message = f"{name} decodes plainly, without guesses: {self.why_plain(request)}."
            warnings.warn(message, LookfarWarning, stacklevel=5)

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


def settle(requests: list[Request], lengths: list[int]) -> None:
    """Leave the random generator where `generate` leaves it: it draws for all until the last one is done."""
    if requests[0].draws is not None:
        requests[0].draws.noise.settle(max(lengths))


def _ids_of(encoded: Any) -> list[int]:
    ids: list[int] = encoded.input_ids
    return ids


def _is_stock(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("transformers.")
