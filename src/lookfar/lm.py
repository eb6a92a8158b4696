"""`LM`: text at the edges, token ids inside."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lookfar.drafters.base import Strategy
from lookfar.drafters.grammar import forced_text
from lookfar.drafters.registry import StrategySpec, for_model, parse_strategy
from lookfar.engine.driver import Driver
from lookfar.engine.engine import Engine, EngineConfig
from lookfar.engine.fallback import FallbackStream, decode_with_transformers
from lookfar.engine.outputs import RequestResult, StepOutput
from lookfar.engine.prior import prior_context
from lookfar.engine.request import KVOptions, Request
from lookfar.engine.warmup import example_prompt, warm_up
from lookfar.errors import LookfarWarning, ModelError, RequestError
from lookfar.inputs import PromptReader
from lookfar.models.binding import BoundModel
from lookfar.models.hooks import has_position_hooks
from lookfar.models.self_check import why_not_verified
from lookfar.options import GenerateOptions, GenerationArguments
from lookfar.prompts import Messages, Prompt
from lookfar.retrieval.draft_store import DraftStore
from lookfar.runners import create_runner
from lookfar.sampling.argument_checks import checked_generator
from lookfar.sampling.noise import RandomStream, SamplingNoise
from lookfar.sampling.params import GenerationRules, PromptRow, generation_rules
from lookfar.sampling.sampler import SamplingParams
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.row_budget import Budget, check_budget, default_budget
from lookfar.streams import Completion, OutputSource, Stream, noise_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

TokenIds = list[int] | tuple[int, ...] | range
OnStep = Callable[[StepOutput], None]  # called after each step of a request that emitted tokens


class LM:
    """A language model that decodes in fewer steps and returns what `model.generate` returns.

    `strategy` is "auto" by default: every source of drafts that pays, with as many rows a step as were measured to pay
    on this machine (`budget="auto"`). `pack` keeps a packed copy of the linear weights for faster steps; by default on
    a CPU in float32, if memory allows. On a CUDA device steps run as CUDA graphs where the model allows it
    (`cuda_graphs=None`); `compile` also runs its layers through `torch.compile`. There, in half precision, `exact`
    makes the text bit-for-bit independent of drafts and batches: by default where the model allows it (docs/gpu.md);
    True makes its absence an error. `store` is a file of past texts to draft from; with
    `remember`, answers are kept for drafting later ones, in this process. The model is put into evaluation mode and
    otherwise left as it is. An LM can be used from several threads: their requests share steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        *,
        strategy: StrategySpec = "auto",
        budget: Budget = None,
        pack: bool | None = None,
        cuda_graphs: bool | None = None,
        compile: bool = False,
        exact: bool | None = None,
        store: str | os.PathLike[str] | None = None,
        remember: bool = True,
        max_batch: int = 8,
        max_length: int | None = None,
        prefill_chunk: int = 512,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ModelError(
                f"LM takes a transformers model, not {type(model).__name__}: use lookfar.load for names and paths."
            )
        self.model = model.eval()
        self.processor = tokenizer if isinstance(tokenizer, ProcessorMixin) else None
        self.tokenizer: PreTrainedTokenizerBase | None = getattr(tokenizer, "tokenizer", tokenizer)
        self.strategy = parse_strategy(strategy)
        check_budget(budget)
        self.budget = budget
        self.remember = remember
        config = EngineConfig(max_batch, max_length, prefill_chunk)
        bound = BoundModel(model, pack=pack)
        if reason := why_not_verified(bound):
            bound.refuse(reason)
        state = self.new_draft_state(bound.vocab_size)
        if store is not None:
            state.store.load(store)
        self.engine = Engine(create_runner(bound, cuda_graphs, compile, exact), config, state)
        self.engine.prior_context = prior_context(bound, self.template_ids("\n") if self.tokenizer is not None else [])
        self.driver = Driver(self.engine)
        self._warned: set[str] = set()

    @property
    def device(self) -> torch.device:
        return self.engine.runner.model.device

    @property
    def draft_state(self) -> DraftState:
        """The data of past requests to draft from. Requests use the one that is set when they are submitted."""
        return self.engine.draft_state

    @draft_state.setter
    def draft_state(self, state: DraftState) -> None:
        self.engine.draft_state = state

    @property
    def store(self) -> DraftStore:
        """Past texts to draft from: `learn`, `save` and `load`."""
        return self.draft_state.store

    def forget(self) -> None:
        """Start with an empty draft state; the contents of the store are dropped too. It is shared as it was before."""
        state = self.new_draft_state(self.draft_state.sources.vocab_size)
        self.draft_state = state.in_place_of(self.draft_state)

    def new_draft_state(self, vocab_size: int) -> DraftState:
        """Return the draft state that a new LM starts with."""
        return DraftState(vocab_size, DraftStore(vocab_size, self.tokenizer))

    def refresh(self) -> None:
        """Drop all copies of the model's weights.

        Only needed after single values were changed through `.data`: all other changes are detected before the next
        call (docs/generation.md, "Models that change").
        """
        self.driver.call(lambda: self.engine.refresh(everything=True))

    def warmup(
        self, *, requests: int | None = None, length: int | None = None, sampling: bool = False, prior: bool = True
    ) -> None:
        """Do now what first requests would wait for: compile, capture CUDA graphs, pack weights, measure steps.

        Up to `requests` at once (`max_batch`) will run at full speed, as long as no text has more than `length` tokens,
        prompt included (1,024); with `sampling`, sampled ones too. With `prior`, the model also predicts what follows
        single tokens, for three seconds at most, to draft from. Nothing is done twice, and outputs stay as they are.
        """
        if not self.engine.runner.model.support.drafts or self.why_call_falls_back():
            return
        ids, kinds = example_prompt(self.engine), (False, True) if sampling else (False,)
        examples = [self.requests(ids, max_new_tokens=len(ids), do_sample=kind, seed=0)[0][0] for kind in kinds]
        warm_up(self.driver, examples, requests or self.engine.scheduler.max_batch, length, prior)

    @overload
    def generate(
        self, prompt: str | TokenIds, *, on_step: OnStep | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...] | Seq[TokenIds],
        *,
        on_step: OnStep | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]: ...
    @overload
    def generate(self, prompt: Any, *, on_step: OnStep | None = None, **options: Unpack[GenerateOptions]) -> Any: ...

    def generate(self, prompt: Any, *, on_step: OnStep | None = None, **options: Unpack[GenerateOptions]) -> Any:
        """Decode one prompt, or a list of them; greedily, unless an option asks for sampling.

        A prompt is a text or token ids; what a tokenizer or processor returns can be given as it is, images and audio
        included. An encoder-decoder model encodes the prompt and decodes from its own first tokens.

        Options are those of `requests`: `max_new_tokens`, `strategy`, `seed`, … and every generation argument of
        transformers. `on_step` is called in this thread with the output of each step.
        """
        requests, single = self.requests(prompt, **options)
        completions = [Completion.of(result, self.tokenizer) for result in self.run(requests, on_step)]
        return completions[0] if single else completions

    def stream(self, prompt: Any, **options: Unpack[GenerateOptions]) -> Stream:
        """Decode as `generate` does, and yield one chunk for each step."""
        requests, _ = self.requests(prompt, **options)
        ours, others = self._split(requests)
        sources: list[Callable[[], OutputSource]] = []
        if ours:
            sources.append(lambda: self.driver.submit(ours, stream=True))
        if others:
            sources.append(lambda: FallbackStream(self.model, others))
        return Stream(requests, sources, self.tokenizer)

    def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Completion:
        """Answer a conversation in the model's chat template; it may hold images. Options as for `generate`."""
        answer: Any = self.generate(self.chat_prompt(messages), **options)
        return answer[0] if isinstance(answer, list) else answer  # type: ignore[no-any-return]

    def chat_prompt(self, messages: Messages) -> Any:
        """Return a conversation as a prompt for `generate` or `stream`; with a processor, images and audio included."""
        return self._reader.chat(messages)

    def chat_ids(self, messages: Messages) -> list[int]:
        """Return the token ids of a conversation, ready for the model's answer."""
        return self._reader.template_ids(self.chat_text(messages))

    def chat_text(self, messages: Messages) -> str:
        """Return a conversation in the tokenizer's chat template, ready for the model's answer."""
        return self._reader.chat_text(messages)

    def template_ids(self, text: str) -> list[int]:
        """Return the token ids of text that a chat template made, which has its own special tokens."""
        return self._reader.template_ids(text)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, checked."""
        return self._reader.encode(prompt)

    @property
    def _reader(self) -> PromptReader:
        return PromptReader(self.engine.runner.model, self.tokenizer, self.processor)

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
        **arguments: Unpack[GenerationArguments],
    ) -> tuple[list[Request], bool]:
        """Return the requests for a prompt or a list of prompts, and whether it was one prompt.

        `strategy` and `budget` replace those of the LM. With sampling, `seed` or a `generator` gives the tokens that
        `model.generate` gives after `torch.manual_seed(seed)`; without either, torch's own generator is used and left
        as `generate` would leave it. `reuse` starts from the KV that an earlier answer left behind, where the prompt
        continues its text. `json_schema`, `regex` or `grammar` (Lark) constrain the answer; `presence_penalty` and
        `frequency_penalty` lower tokens that it already holds. All other arguments are those of `model.generate`.
        """
        prompts, single = self._reader.read(prompt)
        strategies, rows = self.speculation_for(strategy, budget)
        if max_new_tokens is None and arguments.get("max_length") is None:
            max_new_tokens = 128
        if not isinstance(reuse, bool):
            raise RequestError(f"reuse must be true or false, not {reuse!r}.")
        generator = checked_generator(seed, generator, self.device)
        given = {**arguments, "max_new_tokens": max_new_tokens}
        noise: SamplingNoise | None = None
        requests = []
        for i, one in enumerate(prompts):
            row = PromptRow(one.ids, i, len(prompts), one.source)
            rules = generation_rules(self.model, self.tokenizer, row, given)
            if rules.do_sample and noise is None:
                noise = SamplingNoise(len(prompts), self.device, generator)
            kv = KVOptions(reuse=reuse, first=one.first)
            requests.append(self._request(row, rules, noise, (strategies, rows), kv))
        return requests, single

    def _request(
        self,
        row: PromptRow,
        rules: GenerationRules,
        noise: SamplingNoise | None,
        speculation: tuple[tuple[Strategy, ...], Budget],
        kv: KVOptions,
    ) -> Request:
        strategies, budget = speculation
        request = Request(
            [*row.source, *row.ids],
            rules.max_new_tokens,
            rules.stop_ids,
            strategies + forced_text(rules.processors or ()) if strategies else (),
            budget,
            self.remember,
            rules.criteria,
            SamplingParams(
                rules.processors, RandomStream(noise, row.row) if noise is not None else None, context=row.ids
            ),
            kv,
            self.draft_state,
        )
        self.engine.check(request)
        return request

    def speculation_for(self, strategy: StrategySpec, budget: Budget) -> tuple[tuple[Strategy, ...], Budget]:
        """Return the strategies and the budget of a call; the LM's where the call gives none."""
        strategies = self.strategy if strategy is None else parse_strategy(strategy)
        check_budget(budget)
        strategies = for_model(strategies, self.engine.runner.model)
        return strategies, budget or (self.budget if strategy is None else None) or default_budget(strategies)

    def run(self, requests: list[Request], on_step: OnStep | None = None) -> list[RequestResult]:
        """Decode requests with the engine, and those that it cannot take with transformers."""
        ours, others = self._split(requests)
        noise, results = noise_of(requests), {}
        try:
            if ours:
                submission = self.driver.submit(ours, stream=on_step is not None)
                try:
                    results = submission.results(on_step)
                finally:
                    submission.cancel()
            for i, request in others.items():
                results[i] = decode_with_transformers(self.model, request, i, on_step or (lambda _: None))
        finally:
            if noise is not None:
                done = len(results) == len(requests)
                noise.finish(max(len(result.token_ids) for result in results.values()) if done else None)
        return [results[i] for i in range(len(requests))]

    def _split(self, requests: list[Request]) -> tuple[dict[int, Request], dict[int, Request]]:
        """Return the requests that the engine can take and those for the fallback, by index."""
        ours, others = {}, {}
        of_call = self.why_call_falls_back()
        for i, request in enumerate(requests):
            reason = of_call or self.why_request_falls_back(request)
            if not reason:
                ours[i] = request
            else:
                others[i] = replace(request, strategies=())
                if request.strategies:
                    self._warn(reason)
        return ours, others

    def why_call_falls_back(self) -> str:
        """Return why transformers has to decode all requests of a call; empty if the engine can."""
        if self.driver.is_current_thread:
            return "it is called from inside a request of the same LM"
        if torch.is_autocast_enabled(self.device.type):
            return "autocast is on"
        if has_position_hooks(self.model):
            return "it has forward hooks, which may treat single positions (a hook with `row_wise = True` does not)"
        return ""

    def why_request_falls_back(self, request: Request) -> str:
        """Return why transformers has to decode a request; empty if the engine can."""
        support, refused = self.engine.runner.model.support, self.engine.runner.model.first_pass_refused
        if request.kv.first is not None and refused:
            return refused
        if self.engine.can_speculate(request):
            return ""
        if not support.drafts:
            return support.reason
        return f"{request.max_length} tokens reach past {support.tree_limit}, where its {support.limited_by} sets in"

    def _warn(self, reason: str) -> None:
        """Warn once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            name = self.engine.runner.model.support.model_type
            warnings.warn(f"{name} decodes without speculation: {reason}.", LookfarWarning, stacklevel=5)
