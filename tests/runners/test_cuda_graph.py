"""Flat steps give every family its own tokens: captured on a GPU, and on a CPU with the reference kernels."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import prune

import lookfar
from families import DEVICE, NOT_FLAT, TREES, WINDOW, tiny_model
from helpers import flat_lm, oracle, random_prompts, reference
from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.drafters.lookahead import Lookahead
from lookfar.drafters.scripted import Scripted
from lookfar.engine.engine import Engine, EngineConfig
from lookfar.engine.request import KVOptions, Request
from lookfar.errors import CapacityError, ConfigError, LookfarWarning, ModelError
from lookfar.kernels.row_sum_mode import RowSums
from lookfar.models.binding import BoundModel
from lookfar.runners import create_runner
from lookfar.runners.cuda_graph import runner as runner_module
from lookfar.runners.cuda_graph.graph_step import GraphStep
from lookfar.runners.cuda_graph.memory import GIB, MemoryBudget
from lookfar.runners.cuda_graph.runner import CudaGraphRunner
from lookfar.runners.eager import EagerRunner
from lookfar.testing import run_requests

PROMPTS = random_prompts(3 * WINDOW, 4 * WINDOW + 1, 5)  # two of them longer than any window
NEW = 20
# Flat, but their code synchronizes with the host inside a forward pass (experts in Python loops).
NOT_CAPTURED = {"aria_text", "gemma3n_text", "jetmoe", "longcat_flash", "phimoe"}
DTYPE = torch.float64 if DEVICE == "cpu" else torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(TREES) - NOT_FLAT))
def test_families_give_their_own_tokens(family: str) -> None:
    model = tiny_model(family, DTYPE)
    lm = flat_lm(model)
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    right = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    for strategy in ("none", Lookahead(window=4, ngram=4, guesses=4), right):
        single = lm.generate(PROMPTS[1], max_new_tokens=NEW, strategy=strategy)
        batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=strategy)
        assert single.token_ids == expected[1], strategy
        assert [done.token_ids for done in batch] == expected, strategy
    assert all(done.stats.tokens_per_step > 1.8 for done in batch)
    assert (not lm.engine.runner.limits.padded) == (DEVICE == "cpu" or family not in NOT_CAPTURED)


@pytest.mark.parametrize("family", sorted(NOT_FLAT))
def test_other_families_are_recognized(family: str) -> None:
    assert CudaGraphRunner(BoundModel(tiny_model(family, DTYPE), pack=False)).why_unavailable()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampling(temperature: float) -> None:
    model = tiny_model("llama", torch.float32)
    lm, eager = flat_lm(model, max_batch=3), lookfar.LM(model, prefill_chunk=16, cuda_graphs=False, max_batch=3)
    for seed in range(3):
        options = {"max_new_tokens": NEW, "do_sample": True, "temperature": temperature, "seed": seed}
        for prompts in (PROMPTS[0], PROMPTS):
            one, other = (which.generate(prompts, **options) for which in (lm, eager))
            assert [d.token_ids for d in np.atleast_1d(one)] == [d.token_ids for d in np.atleast_1d(other)]


def test_what_does_not_fit_runs_eagerly() -> None:
    """Deep trees, and more rows than the largest step."""
    model = tiny_model("llama", DTYPE)
    expected = reference(model, PROMPTS[1], 60)
    text = PROMPTS[1] + expected
    deep = Scripted(lambda ids: [text[len(ids) : len(ids) + 40]])
    lm = flat_lm(model)
    runner: Any = lm.engine.runner
    taken: list[StepPlan] = []
    launch = runner.eager.launch
    runner.eager.launch = lambda plan, cache: taken.append(plan) or launch(plan, cache)
    # Trees are kept within the limits, so a deep draft alone does not lead there.
    assert lm.generate(PROMPTS[1], max_new_tokens=60, strategy=deep).token_ids == expected
    assert not taken
    runner.limits = RunnerLimits()
    assert lm.generate(PROMPTS[1], max_new_tokens=60, strategy=deep).token_ids == expected
    assert max(plan.width for plan in taken) > 33


def test_accepted_rows_are_moved_when_a_request_changes_its_slot() -> None:
    """Requests of different lengths leave gaps, reuse KV and export it."""
    model = tiny_model("llama", DTYPE)
    prompts = random_prompts(5, 9, 13, 7, 21)
    news = [3, 17, 9, 21, 5]
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    right = oracle([prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)])
    lm = flat_lm(model, max_batch=2)
    requests = [
        Request(prompt, new, strategies=(right,), kv=KVOptions(export=True))
        for prompt, new in zip(prompts, news, strict=True)
    ]
    results = run_requests(lm.engine, requests)
    assert [result.token_ids for result in results] == expected
    for prompt, result in zip(prompts, results, strict=True):
        assert result.exported is not None
        ids = torch.tensor([(prompt + result.token_ids)[:-1]], device=model.device)
        cache = model(ids, use_cache=True).past_key_values
        for kv, layer in zip(result.exported.layers, cache.layers, strict=True):
            assert kv is not None
            assert torch.allclose(kv[0], layer.keys, atol=1e-4)
            assert torch.allclose(kv[1], layer.values, atol=1e-4)
    longer = prompts[1] + expected[1] + prompts[0]
    again = lm.generate(longer, max_new_tokens=12, reuse=True, strategy="none")
    assert again.token_ids == reference(model, longer, 12)


@pytest.mark.parametrize(("most", "chunk"), [(512, 16), (24, 16), (24, 64)])
def test_prompts_are_prefilled_while_other_requests_decode(most: int, chunk: int) -> None:
    """A request that moves into a gap takes the moves along that are noted for it."""
    model = tiny_model("llama", DTYPE)
    prompts, news = random_prompts(5, 9, 40, 7, 21, 30), [3, 17, 9, 21, 5, 8]
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    right = oracle([prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)])
    lm = flat_lm(model, max_batch=3)
    lm.engine.scheduler.prefill_chunk = chunk
    runner: Any = lm.engine.runner
    runner.limits = replace(runner.limits, rows=most)
    mixed = 0
    launch = runner.launch

    def watched(plan: StepPlan, cache: Any) -> Any:
        nonlocal mixed
        assert plan.batch == len(lm.engine.scheduler.running)  # no request waits
        assert sum(plan.lengths) <= most
        assert sum(len(rows.pending) - 1 for rows in plan.requests) < chunk
        prefills = {len(rows.pending) > 1 for rows in plan.requests}
        mixed += len(prefills) > 1
        return launch(plan, cache)

    runner.launch = watched
    for strategies in ((right,), (), (Lookahead(window=3, ngram=3, guesses=2),)):  # drafts, none, window rows
        requests = [Request(p, n, strategies=strategies) for p, n in zip(prompts, news, strict=True)]
        assert [result.token_ids for result in run_requests(lm.engine, requests)] == expected
    assert mixed > 5


def test_a_request_with_embeddings_is_not_padded_to_the_width_of_prompts() -> None:
    model = tiny_model("llama", DTYPE)
    prompts = random_prompts(40, 30, 35)
    embeds = model.get_input_embeddings()(torch.tensor(prompts[1], device=model.device)).detach()
    lm = flat_lm(model, max_batch=3)
    runner: Any = lm.engine.runner
    fed: list[int] = []
    launch = runner.launch
    runner.launch = lambda plan, cache: fed.append(plan.batch * plan.width) or launch(plan, cache)
    requests = [Request(prompt, 6) for prompt in prompts]
    requests[1] = replace(requests[1], kv=KVOptions(embeds=embeds))
    results = run_requests(lm.engine, requests)
    assert [result.token_ids for result in results] == [reference(model, prompt, 6) for prompt in prompts]
    assert max(fed) <= 16


def test_what_cannot_be_exact_is_refused_if_exactness_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "rows_are_independent", lambda *_: True)  # not so on a CPU
    model = tiny_model("llama", DTYPE)
    runner = CudaGraphRunner(BoundModel(model, pack=False), exact=True)
    assert not runner.why_unavailable()
    assert runner.exact
    engine = Engine(runner, EngineConfig(max_batch=3, prefill_chunk=16))
    with pytest.raises(ConfigError, match="exact=True takes token ids, and 512 rows a step"):
        run_requests(engine, [Request([1], 5, kv=KVOptions(embeds=torch.zeros(1, 32, dtype=DTYPE, device=DEVICE)))])
    assert run_requests(engine, [Request(PROMPTS[0], NEW)])[0].token_ids == reference(model, PROMPTS[0], NEW)


@pytest.mark.parametrize("exact", [True, None])
def test_a_model_whose_rows_depend_on_each_other_is_recognized(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """Its head adds something that depends on the number of rows."""
    model = tiny_model("llama", torch.float32)
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda x: head(x) * (1 + 1e-3 * (x.shape[1] > 100)))
    runner = CudaGraphRunner(BoundModel(model, pack=False), exact=exact)
    if exact:
        assert runner.why_unavailable() == "the bits of a row depend on the other rows"
        return
    runner.layers.fused.exact = True  # as on a GPU in half precision
    with pytest.warns(LookfarWarning, match="llama is not exact in float32: the bits of a row depend"):
        assert not runner.why_unavailable()
    assert not runner.exact


def test_a_model_that_cannot_be_captured_warns_once_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", DTYPE)
    lm = flat_lm(model)
    monkeypatch.setattr(lm.engine.runner, "_capture", lambda *_: _fail("no graphs. Sorry."))
    with pytest.warns(LookfarWarning, match=r"llama runs without CUDA graphs, which is slower: no graphs\.$"):
        done = lm.generate(PROMPTS[0], max_new_tokens=NEW)
    assert done.token_ids == reference(model, PROMPTS[0], NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate(PROMPTS[0], max_new_tokens=2)
    other = CudaGraphRunner(lm.engine.runner.model, exact=True)
    monkeypatch.setattr(other, "_capture", lambda *_: _fail("no graphs"))
    with pytest.raises(ModelError, match="exact=True needs CUDA graphs, which failed: no graphs"):
        run_requests(Engine(other), [Request([1, 2], 3)])


def _fail(message: str) -> None:
    raise RuntimeError(message)


def test_weights_that_are_moved_in_the_middle_of_a_request_are_noticed() -> None:
    model = tiny_model("llama", DTYPE)
    lm = flat_lm(model)
    stream = lm.stream(PROMPTS[0], max_new_tokens=30, strategy="none")

    def read() -> None:
        for number, _ in enumerate(stream):
            if number == 2:
                embedding = model.get_input_embeddings().weight
                embedding.data = embedding.data.clone()

    with pytest.raises(ModelError, match="weights were moved while this request was running"):
        read()
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)


@pytest.mark.skipif(DEVICE != "cpu", reason="about machines without a GPU")
@pytest.mark.parametrize("option", ["cuda_graphs", "compile", "exact"])
def test_options_for_a_gpu_are_refused_elsewhere(option: str) -> None:
    model = tiny_model("llama", DTYPE)
    with pytest.raises(ConfigError, match=f"{option}=True is unavailable for this model: it is not on a CUDA device"):
        lookfar.LM(model, **{option: True})
    with pytest.raises(ConfigError, match="remove cuda_graphs=False"):
        lookfar.LM(model, cuda_graphs=False, exact=True)
    assert isinstance(create_runner(BoundModel(model)), EagerRunner)


def test_the_cache_is_sized_from_what_is_free() -> None:
    def sized(free: int, slots: int, length: int) -> tuple[int, int]:
        position_bytes = 1 << 17  # as of Llama-3-8B
        return MemoryBudget(position_bytes, GIB, free * GIB).cache_size(slots, length, 8)

    assert sized(100, 1, 700) == (8, 1024)
    assert sized(100, 1, 5000) == (8, 8192)
    assert sized(4, 2, 5000) == (2, 5056)  # no more than needed
    with pytest.raises(CapacityError, match=r"2 requests of 5056 tokens needs 1\.2 GiB, and 1\.0 GiB are free: lower"):
        sized(2, 2, 5000)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_text_does_not_depend_on_the_drafts(dtype: torch.dtype) -> None:
    """Random weights have many near-ties, so a single bit would show."""
    model = tiny_model("llama", dtype, hidden_size=128, num_hidden_layers=4, head_dim=32, intermediate_size=256)
    lm = lookfar.LM(model, max_batch=4)
    assert lm.engine.runner.name == "cuda graphs exact"
    prompts = random_prompts(5, 40, 70, 130, 31, 64, 3, 90)
    none = [lm.generate(prompt, max_new_tokens=100, strategy="none").token_ids for prompt in prompts]
    right = oracle([prompt + tokens for prompt, tokens in zip(prompts, none, strict=True)])
    for strategy in ("auto", right, "recycle"):
        budget = 32 if strategy == "recycle" else None
        lm.forget()
        single = [lm.generate(p, max_new_tokens=100, strategy=strategy, budget=budget) for p in prompts]
        batch = lm.generate(prompts, max_new_tokens=100, strategy=strategy, budget=budget)
        assert [done.token_ids for done in single] == none
        assert [done.token_ids for done in batch] == none


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, None])
def test_graphs_with_other_bits_are_recognized(monkeypatch: pytest.MonkeyPatch, exact: bool | None) -> None:
    """As of a compiler that treats one row differently, which the check of uncompiled steps does not see."""
    lm = lookfar.LM(tiny_model("llama", torch.bfloat16), exact=exact)
    run = GraphStep.run
    monkeypatch.setattr(GraphStep, "run", lambda step: run(step) * (1.5 if step.rows > 1 else 1))
    if exact:
        with pytest.raises(ModelError, match="exact=True is unavailable for this model: the bits of a row depend"):
            lm.generate(PROMPTS[0], max_new_tokens=NEW, strategy="none")
    else:
        with pytest.warns(LookfarWarning, match="llama is not exact in bfloat16"):
            lm.generate(PROMPTS[0], max_new_tokens=NEW, strategy="none")


@pytest.mark.gpu
def test_norms_sum_in_one_order() -> None:
    x = torch.randn(512, 4096, device=DEVICE)
    with RowSums():
        whole = x.pow(2).mean(-1, keepdim=True)
        assert all(torch.equal(x[:n].pow(2).mean(-1, keepdim=True), whole[:n]) for n in (1, 2, 4, 8, 64))
        assert torch.allclose(x.sum(1), x.double().sum(1).float(), atol=1e-3)
        assert x.sum(0).shape == (4096,)
    assert torch.allclose(whole, x.pow(2).mean(-1, keepdim=True))


@pytest.mark.gpu
def test_compiled_layers_on_the_gpu() -> None:
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model, compile=True)
    for prompt in PROMPTS:
        assert lm.generate(prompt, max_new_tokens=NEW).token_ids == reference(model, prompt, NEW)
    assert lm.engine.runner.graph_bytes > 0  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_a_cache_that_does_not_fit_is_refused_before_it_is_made() -> None:
    lm = lookfar.LM(tiny_model("llama", torch.float32, max_position_embeddings=1 << 30))
    with pytest.raises(CapacityError, match="GiB are free"):
        lm.generate([1, 2, 3], max_new_tokens=1 << 29)


def test_copies_and_saved_models_know_nothing_of_it(tmp_path: Any) -> None:
    model = tiny_model("llama", torch.float32)
    lm = flat_lm(model)
    expected = lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
    clone = copy.deepcopy(model)
    assert reference(clone, PROMPTS[0], NEW) == expected
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).to(model.device)
    assert reference(again, PROMPTS[0], NEW) == expected


def test_layers_that_compute_their_weights_are_not_compiled() -> None:
    model = tiny_model("llama", torch.float32)
    assert CudaGraphRunner(BoundModel(model), compile=True).layers.compiled is not None
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.5)
    with pytest.warns(LookfarWarning, match="runs uncompiled: its layers compute their weights"):
        assert CudaGraphRunner(BoundModel(model), compile=True).layers.compiled is None
