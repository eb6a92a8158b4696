"""Sampling on the device: the same tokens as one after the other, without asking the host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import lookfar
from families import DEVICE, tiny_model
from helpers import random_prompts
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import NO_TREE, DraftTree
from lookfar.engine.request import Request, RequestState
from lookfar.engine.verify import take_sampled, verify
from lookfar.errors import RequestError, SamplingError
from lookfar.kernels.sampling import sample
from lookfar.runners.base import StepResult
from lookfar.runners.cuda_graph.graph_sampler import set_noise_addresses
from lookfar.sampling.noise import RandomStream, SamplingNoise
from lookfar.sampling.processors import processors_key
from lookfar.sampling.sampler import NO_TOKEN, Sampler, SamplingParams, noisy_probabilities, process_rows
from lookfar.speculation.draft_state import DraftState

PROCESSORS = {
    "none": LogitsProcessorList(),
    "top-k": LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)]),
    "top-p": LogitsProcessorList([TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_row_meets_its_own_noise(name: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    rows, vocabulary = 7, 2500  # more than one block of the vocabulary
    logits = 3 * torch.randn(rows, vocabulary, device=DEVICE, generator=generator)
    noise = torch.empty(3, vocabulary, device=DEVICE).exponential_(1, generator=generator)
    places = [0, 1, 1, 2, 0, 2]
    addresses = torch.tensor([*(noise[place].data_ptr() for place in places), 0], device=DEVICE)
    scores = PROCESSORS[name](torch.zeros(rows, 1, dtype=torch.long, device=DEVICE), logits.clone())
    expected = noisy_probabilities(scores[:6], noise[places]).argmax(-1).tolist()
    assert sample(process_rows(PROCESSORS[name], logits), addresses).tolist() == [*expected, int(scores[6].argmax())]


def test_scores_without_a_number_are_told() -> None:
    logits = torch.randn(2, 100, device=DEVICE)
    logits[1, 3] = torch.nan
    noise = torch.ones(100, device=DEVICE)
    sampled = sample(logits, torch.tensor([noise.data_ptr()] * 2, device=DEVICE))
    assert sampled.tolist() == [int(logits[0].argmax()), NO_TOKEN]


@pytest.mark.parametrize("crowded", [False, True])
def test_rows_find_the_noise_of_their_positions(crowded: bool) -> None:
    """A prefill chunk, a tree behind pending tokens, a request that does not sample, and one without drafts."""
    noise = SamplingNoise(4, torch.device("cpu"), torch.Generator().manual_seed(3))
    samplers = [Sampler(SamplingParams(random=RandomStream(noise, row)), []) for row in range(4)]
    samplers[1].append([5, 6])
    tree = DraftTree.from_paths([[1, 2, 3], [1, 4], [7]])
    plan = StepPlan(
        [
            RequestPlan(np.zeros(3, np.int64), 0, complete=False, sampler=samplers[0]),
            RequestPlan(np.zeros(2, np.int64), 9, tree=tree, sampler=samplers[1]),
            RequestPlan(np.zeros(1, np.int64), 4, tree=tree),
            RequestPlan(np.zeros(1, np.int64), 4, sampler=samplers[3]),
        ]
    )
    if crowded:  # requests are asked one by one, and what they find is kept until it is read
        noise._most = 50 * 4
    addresses = np.full(18, 77, np.int64)
    kept = set_noise_addresses(addresses, plan, width=50)
    assert bool(kept) == crowded
    drawn = SamplingNoise(4, torch.device("cpu"), torch.Generator().manual_seed(3))
    of_rows = [(1, 2 + depth) for depth in (0, *tree.depths.tolist())]
    expected = [None] * 4 + of_rows + [None] * 6 + [(3, 0), None]
    for address, where in zip(addresses.tolist(), expected, strict=True):
        assert (address == 0) == (where is None)
        if where is not None:
            found = np.ctypeslib.as_array((ctypes.c_float * 50).from_address(address))
            assert found.tolist() == drawn.at(where[1], where[0], 50).tolist()


def test_requests_of_several_calls_find_their_noise_together() -> None:
    """As in a server, where every request is a call of its own; one call has several requests, at other positions."""
    noises = [SamplingNoise(2, torch.device("cpu"), torch.Generator().manual_seed(seed)) for seed in range(3)]
    streams = [RandomStream(noises[0], 1), RandomStream(noises[1], 0), RandomStream(noises[0], 0)]
    samplers = [Sampler(SamplingParams(random=stream), []) for stream in streams]
    samplers[2].append([1, 2, 3])
    plan = StepPlan([RequestPlan(np.zeros(1, np.int64), 4, sampler=sampler) for sampler in samplers])
    for _ in range(300):  # more positions than there is room for at first
        addresses = np.zeros(3, np.int64)
        assert not set_noise_addresses(addresses, plan, width=7)
        for address, stream, sampler in zip(addresses.tolist(), streams, samplers, strict=True):
            assert address == stream.at(sampler.num_emitted, 7).data_ptr()
            sampler.append([5])


def test_sampled_tokens_are_taken_for_requests_that_sample() -> None:
    tree = DraftTree.from_paths([[1, 2]])
    rows = [RequestPlan(np.zeros(2, np.int64), 0, tree=tree), RequestPlan(np.zeros(1, np.int64), 0, tree=tree)]
    plan = StepPlan([*rows, RequestPlan(np.zeros(2, np.int64), 0, complete=False)])
    choices = np.arange(9)
    take_sampled(choices, 100 + np.arange(9), np.array([0, 4, 7]), plan.flat.about, np.array([True, False, True]))
    assert choices.tolist() == [0, 101, 102, 103, 4, 5, 6, 7, 8]


def test_requests_with_the_same_processors_are_sampled_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, in steps that are too large for a graph; NaN scores end their own request only."""
    calls: list[int] = []
    choose = lookfar.engine.verify.choose_rows

    def counted(processors: Any, logits: torch.Tensor, noise: Any) -> Any:
        calls.append(len(logits))
        return choose(processors, logits, noise)

    monkeypatch.setattr(lookfar.engine.verify, "choose_rows", counted)
    monkeypatch.setattr(lookfar.engine.verify, "ROWS_TOGETHER", 9)
    torch.manual_seed(2)
    scores, tree = 3 * torch.randn(16, 40), DraftTree.from_paths([[1, 2], [3]])
    scores[8] = torch.nan
    trees = [tree, tree, NO_TREE, tree, NO_TREE]
    requests = []
    for row, temperature in enumerate([0.7, 0.7, 0.7, 0.7, 1.3]):
        processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        noise = SamplingNoise(5, torch.device("cpu"), torch.Generator().manual_seed(4))
        sampling = SamplingParams(processors, RandomStream(noise, row))
        state = RequestState(Request([5], 40, sampling=sampling), row, 0, DraftState(40))
        state.start()
        state.samples_by_row, state.has_rules = True, False  # as on an accelerator
        requests.append(state)
    plan = StepPlan([RequestPlan(np.zeros(1, np.int64), 0, tree=tree) for tree in trees])
    starts = np.cumsum([0, *plan.lengths[:-1]])
    result = StepResult(
        starts, scores.argmax(-1).numpy(), lambda place, rows: scores[starts[place] + rows[0] :][: len(rows)]
    )
    walks = verify(requests, plan, result)
    assert calls == [9, 4, 1]
    assert walks[2] is None
    assert isinstance(requests[2].error, SamplingError)
    for place in (0, 1, 3, 4):
        state, walk = requests[place], walks[place]
        assert walk is not None
        for depth, token in enumerate(walk.tokens):
            node = walk.nodes[depth - 1] if depth else -1
            row = scores[starts[place] + 1 + node]
            noise = SamplingNoise(5, torch.device("cpu"), torch.Generator().manual_seed(4))
            own = process_rows(state.sampler.processors, row[None])
            assert token == int(noisy_probabilities(own, noise.at(depth, place, 40)[None]).argmax())


def test_processors_that_do_the_same_are_one() -> None:
    def of(*processors: LogitsProcessor) -> Any:
        return processors_key(LogitsProcessorList(processors))

    assert of(TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)) == of(
        TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)
    )
    assert of(TemperatureLogitsWarper(0.7)) != of(TemperatureLogitsWarper(0.8))
    assert of(TopKLogitsWarper(5), TopPLogitsWarper(0.5)) != of(TopPLogitsWarper(0.5), TopKLogitsWarper(5))
    assert processors_key(None) == of() != of(TopKLogitsWarper(5))

    class Tensorial(LogitsProcessor):
        def __init__(self) -> None:
            self.bias = torch.ones(3)

    assert of(Tensorial()) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7, "top_k": 0},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 1.2, "top_k": 0, "top_p": 0.8},
    ],
)
@pytest.mark.parametrize("strategy", ["none", "auto"])
def test_drawn_in_graphs(how: dict[str, Any], strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `generate` samples, before and after sampling is captured; nothing is sampled on the host."""
    calls: list[int] = []
    by_host = lookfar.engine.verify.choose_rows

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return by_host(*arguments)

    monkeypatch.setattr(lookfar.engine.verify, "choose_rows", counted)
    model = tiny_model("llama", torch.float32)
    lm, new = lookfar.LM(model, max_batch=3), 80
    budget = None if strategy == "none" else 16
    prompts = random_prompts(9, 30, 17)
    monkeypatch.setattr("lookfar.runners.cuda_graph.graph_sampler.WORTH_CAPTURING", 40)
    for _ in range(3):
        for seed, prompt in enumerate(prompts):
            torch.manual_seed(seed)
            ids = torch.tensor([prompt], device=model.device)
            sampled = model.generate(ids, max_new_tokens=new, do_sample=True, pad_token_id=0, **how)
            expected = sampled[0, len(prompt) :].tolist()
            done = lm.generate(prompt, max_new_tokens=new, strategy=strategy, budget=budget, seed=seed, **how)
            assert done.token_ids == expected
    assert not calls
    together = lm.generate(prompts, max_new_tokens=new, strategy=strategy, budget=budget, seed=5, **how)
    eager = lookfar.LM(model, cuda_graphs=False, max_batch=3)
    one_by_one = eager.generate(prompts, max_new_tokens=new, strategy="none", seed=5, **how)
    assert [done.token_ids for done in together] == [done.token_ids for done in one_by_one]


@pytest.mark.gpu
def test_forbidding_every_token_is_an_error_in_graphs_too() -> None:
    lm = lookfar.LM(tiny_model("llama", torch.float32))
    everything = list(range(lm.model.config.vocab_size))
    with pytest.raises(RequestError, match="are NaN"):
        lm.generate([1, 2, 3], max_new_tokens=40, do_sample=True, suppress_tokens=everything)
    seen: list[int] = []

    def look(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(int(ids.min()))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    with pytest.raises(RequestError, match="are NaN"):
        lm.generate([1, 2, 3], max_new_tokens=9, do_sample=True, suppress_tokens=everything, stopping_criteria=[look])
    assert not seen
