"""Checks for drafters of other packages: the contract of docs/writing-a-drafter.md.

`check_strategy(MyStrategy())` decodes with a tiny random model and raises `AssertionError` with one sentence if the
strategy breaks the contract. The output of the model can never depend on a drafter; this is checked too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lookfar.drafters.base import MAX_SCORE, DraftContext, Drafter, Outcome, Proposal, Strategy, wants_hidden
from lookfar.drafters.scripted import Scripted
from lookfar.engine.engine import Engine
from lookfar.engine.outputs import RequestResult, StepOutput
from lookfar.engine.request import Request
from lookfar.lm import LM
from lookfar.models.binding import BoundModel
from lookfar.options import GenerateOptions

__all__ = ["Scripted", "check_strategy", "run_requests", "tiny_model"]

VOCABULARY = 96
NEW_TOKENS = 24
# Texts with repetitions, so that there is something to copy; one token; and a text without any repetition.
PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8], [3], list(range(20, 60)))


def run_requests(
    engine: Engine, requests: Seq[Request], on_step: Callable[[StepOutput], None] = lambda _: None
) -> list[RequestResult]:
    """Step an engine in this thread until all requests are done; an error of a request is raised."""
    handles = [engine.add(request, index) for index, request in enumerate(requests)]
    results: dict[int, RequestResult] = {}
    try:
        while len(results) < len(requests):
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                on_step(output)
                if output.result is not None:
                    results[output.index] = output.result
    finally:
        for handle in handles:
            engine.cancel(handle)
    return [results[index] for index in range(len(requests))]


def tiny_model() -> PreTrainedModel:
    """Return a random model in float64, the same one every time."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # wide enough that the next token depends on the whole text
                    parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return model


def check_strategy(strategy: Strategy, model: PreTrainedModel | None = None) -> None:
    """Check the contract of a strategy and its drafters with a model; by default a tiny random one."""
    model = model if model is not None else tiny_model()
    _check(bool(strategy.name), "a strategy has a name")
    _check(strategy.max_rows >= 1, "max_rows is at least 1")
    _check_exactness(strategy, model)
    _check_isolation(strategy, model)


@dataclass(frozen=True)
class _Watched(Strategy):
    """A strategy whose drafters are checked at every call."""

    name: ClassVar[str] = "watched"
    inner: Strategy
    vocab_size: int
    proposals: dict[tuple[int, ...], list[list[list[int]]]] = field(default_factory=dict)  # by prompt

    @property
    def uses_window(self) -> bool:  # type: ignore[override]
        return self.inner.uses_window

    @property
    def max_rows(self) -> int:
        return self.inner.max_rows

    def check(self, model: BoundModel) -> None:
        self.inner.check(model)

    def create(self, context: DraftContext) -> list[Drafter]:
        drafters = self.inner.create(context)
        _check(bool(drafters), "create returns at least one drafter")
        proposals = self.proposals.setdefault(tuple(context.prompt), [])
        return [_WatchedDrafter(drafter, self.vocab_size, proposals) for drafter in drafters]


class _WatchedDrafter:
    """Passes everything on to a drafter and checks what it returns."""

    def __init__(self, inner: Drafter, vocab_size: int, proposals: list[list[list[int]]]) -> None:
        self.inner = inner
        self.vocab_size = vocab_size
        self.name = inner.name
        self.wants_predictions = inner.wants_predictions
        self.wants_hidden = wants_hidden(inner)
        self.proposals = proposals

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        before = list(ids)
        proposal = self.inner.propose(ids, limit)
        name = self.name
        _check(list(ids) == before, f"{name}: propose does not change the text it is given")
        _check(isinstance(proposal, Proposal), f"{name}: propose returns a Proposal")
        drafts = proposal.drafts
        _check(drafts.ndim == 2 and drafts.dtype == np.int32, f"{name}: drafts are an int32 array [k, depth]")
        _check(drafts.shape[1] <= limit or not len(drafts), f"{name}: no draft is deeper than the limit of {limit}")
        _check(bool((drafts >= -1).all()), f"{name}: draft tokens are at least 0, and -1 behind the end of a draft")
        _check(bool((drafts < self.vocab_size).all()), f"{name}: draft tokens are in the vocabulary")
        _check(len(proposal.scores) == len(drafts), f"{name}: every draft has a score")
        _check(len(proposal.weights) == len(drafts), f"{name}: every draft has a weight")
        in_range = (proposal.scores >= 0) & (proposal.scores <= MAX_SCORE)
        _check(bool(in_range.all()), f"{name}: scores go from 0 to {MAX_SCORE}")
        _check(bool((np.isfinite(proposal.weights) & (proposal.weights > 0)).all()), f"{name}: weights are above 0")
        self.proposals.append(drafts.tolist())
        return proposal

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        before = list(ids)
        self.inner.observe(ids, outcome)
        _check(list(ids) == before, f"{self.name}: observe does not change the text it is given")


def _check_exactness(strategy: Strategy, model: PreTrainedModel) -> None:
    """The tokens are those of decoding without drafts: alone and in a batch, greedy and sampled, cold and warm."""
    lm, base = LM(model, max_batch=2, prefill_chunk=16), LM(model, strategy="none")
    watched = _Watched(strategy, _vocab_size(lm))
    calls: list[GenerateOptions] = [{}, {"temperature": 0.9, "seed": 1}]
    for options in calls:
        for budget in (None, 8):
            options["max_new_tokens"] = NEW_TOKENS
            asked: GenerateOptions = {**options, "strategy": watched, "budget": budget}
            expected = [base.generate(prompt, **options).token_ids for prompt in PROMPTS]
            for _ in range(2):
                found = [lm.generate(prompt, **asked).token_ids for prompt in PROMPTS]
                _check(found == expected, f"{strategy.name}: the output equals decoding without drafts")
            batch = lm.generate(list(PROMPTS), **asked)
            alone = base.generate(list(PROMPTS), **options)
            same = [done.token_ids for done in batch] == [done.token_ids for done in alone]
            _check(same, f"{strategy.name}: the output of a batch equals decoding without drafts")


def _check_isolation(strategy: Strategy, model: PreTrainedModel) -> None:
    """With remember=False a request gets the same drafts alone, after other requests, and in a batch with them."""

    def drafts_of(*calls: list[list[int]]) -> list[list[list[int]]]:
        """Return all drafts for the first of the prompts in the last call."""
        lm = LM(model, remember=False)
        for prompts in calls[:-1]:
            lm.generate(prompts, max_new_tokens=NEW_TOKENS, strategy=strategy, budget=32)
        watched = _Watched(strategy, _vocab_size(lm))
        lm.generate(calls[-1], max_new_tokens=NEW_TOKENS, strategy=watched, budget=1)
        return watched.proposals[tuple(calls[-1][0])]

    first, _, other = PROMPTS
    alone, later, beside = drafts_of([first]), drafts_of([other], [first], [first]), drafts_of([first, other])
    _check(alone == later, f"{strategy.name}: with remember=False a request leaves nothing to later ones")
    _check(alone == beside, f"{strategy.name}: the drafts of a request do not depend on others in its batch")


def _vocab_size(lm: LM) -> int:
    return lm.engine.runner.model.vocab_size


def _check(fine: bool, contract: str) -> None:
    if not fine:
        raise AssertionError(f"The contract is broken: {contract}.")
