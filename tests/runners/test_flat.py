"""Flat steps on a CPU: the tokens of transformers' own `generate`, and no row or key more than a request needs."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lookfar
from families import DEVICE, NOT_FLAT, WINDOW, tiny_model
from helpers import oracle, random_prompts, reference
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.drafters.lookahead import Lookahead
from lookfar.engine.costs import measure_steps, own_cache
from lookfar.engine.request import KVOptions, Request
from lookfar.models import request_attention
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import one_slot, taken_slots
from lookfar.runners import create_runner
from lookfar.runners.flat import FlatRunner, agrees_with_padded, check_plan, flat_logits
from lookfar.testing import run_requests

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="about steps on a CPU")

PROMPTS = random_prompts(3 * WINDOW, 4 * WINDOW + 1, 5, 17)
NEW = 20
# One of each: full attention, windows, both, chunks, soft caps, sinks, latent attention, experts, learned positions.
KINDS = ["llama", "mistral", "gemma3_text", "llama4_text", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "gpt2"]


def right_drafts(model: PreTrainedModel, prompts: list[list[int]], new: int = NEW) -> tuple[Any, list[list[int]]]:
    """A drafter that knows the texts, and the texts."""
    expected = [reference(model, prompt, new) for prompt in prompts]
    return oracle([prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]), expected


def watch(runner: Any) -> list[StepPlan]:
    """The plans that a runner is given from now on."""
    seen: list[StepPlan] = []
    launch = runner.launch
    runner.launch = lambda plan, cache: seen.append(plan) or launch(plan, cache)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_sampled_batches_equal_those_of_transformers(family: str) -> None:
    plain = tiny_model(family, torch.float32)
    fast = lookfar.accelerate(copy.deepcopy(plain))
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    arguments = {"attention_mask": (ids != 0).long(), "max_new_tokens": NEW, "pad_token_id": 0}
    for options in ({"do_sample": False}, {"do_sample": True}, {"do_sample": True, "temperature": 0.6, "top_k": 8}):
        texts = []
        for model in (plain, fast):
            torch.manual_seed(1)
            texts.append(model.generate(ids, **arguments, **options))
        assert torch.equal(*texts), options


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_precisions_and_attentions_agree_with_padded_steps(dtype: torch.dtype, attention: str) -> None:
    assert agrees_with_padded(BoundModel(tiny_model("llama", dtype, attention=attention)))


@pytest.mark.parametrize("family", sorted(NOT_FLAT))
def test_other_families_run_padded(family: str) -> None:
    model = tiny_model(family)
    right, expected = right_drafts(model, PROMPTS[:2], 6)
    lm = lookfar.LM(model)
    assert [d.token_ids for d in lm.generate(PROMPTS[:2], max_new_tokens=6, strategy=right)] == expected
    assert lm.engine.runner.limits.padded


def test_a_step_computes_the_rows_of_all_requests_and_no_padding() -> None:
    model = tiny_model("llama")
    right, expected = right_drafts(model, PROMPTS)
    lm = lookfar.LM(model)
    fed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: fed.append(ids[0].numel()))
    lm.engine.runner.refresh()
    plans = watch(lm.engine.runner)
    results = run_requests(lm.engine, [Request(prompt, NEW, strategies=(right,)) for prompt in PROMPTS])
    assert [result.token_ids for result in results] == expected
    assert any(len(set(plan.lengths)) > 1 for plan in plans[1:])
    checked = plans[0]  # before it, the two steps of the self-check
    assert fed[2:] == [sum(plan.lengths) for plan in plans], checked.lengths


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_attention_reads_no_more_than_a_text_and_no_more_than_a_window(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    read: list[tuple[int, int]] = []
    attend = request_attention.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        read.append((query.shape[2], key.shape[2]))
        return attend(query, key, value, **options)

    lm = lookfar.LM(model)
    lm.generate(PROMPTS, max_new_tokens=3, strategy="lookahead")  # the self-check
    assert not lm.engine.runner.limits.padded
    monkeypatch.setattr(request_attention, "scaled_dot_product_attention", watched)
    plans = watch(lm.engine.runner)
    run_requests(lm.engine, [Request(prompt, 3) for prompt in PROMPTS])
    expected = []
    for plan in plans:
        texts = [(len(rows), rows.num_cached, rows.num_cached + len(rows)) for rows in plan.requests]
        near = [(count, end - max(cached - WINDOW + 1, 0)) for count, cached, end in texts]
        full = [(count, end) for count, _, end in texts]
        expected += [*near, *full] if family == "gemma3_text" else [*full, *full]
    assert read == expected


def test_prompts_are_prefilled_while_other_requests_decode() -> None:
    model = tiny_model("llama")
    prompts, news = random_prompts(5, 9, 40, 7, 21, 30), [3, 17, 9, 21, 5, 8]
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    right = oracle([prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)])
    lm = lookfar.LM(model, max_batch=3, prefill_chunk=16)
    plans = watch(lm.engine.runner)
    for strategies in ((right,), (), (Lookahead(window=3, ngram=3, guesses=2),)):  # drafts, none, window rows
        requests = [Request(p, n, strategies=strategies) for p, n in zip(prompts, news, strict=True)]
        assert [result.token_ids for result in run_requests(lm.engine, requests)] == expected
    assert sum(len({len(rows.pending) > 1 for rows in plan.requests}) > 1 for plan in plans) > 5
    assert max(sum(len(rows.pending) - 1 for rows in plan.requests) for plan in plans[1:]) < 16


def test_embeddings_beside_token_ids() -> None:
    model = tiny_model("llama")
    prompts = random_prompts(12, 9, 15)
    embeds = model.get_input_embeddings()(torch.tensor(prompts[1])).detach()
    lm = lookfar.LM(model, prefill_chunk=64)
    plans = watch(lm.engine.runner)
    requests = [Request(prompt, 6) for prompt in prompts]
    requests[1] = replace(requests[1], kv=KVOptions(embeds=embeds))
    results = run_requests(lm.engine, requests)
    assert [result.token_ids for result in results] == [reference(model, prompt, 6) for prompt in prompts]
    assert [len(rows) for rows in plans[0].requests] == [12, 9, 15]
    assert not lm.engine.runner.limits.padded


def test_results_are_those_of_the_rows_that_need_logits() -> None:
    model = BoundModel(tiny_model("llama"))
    runner: Any = create_runner(model)
    cache = runner.create_cache()
    cache.reserve(2, 64, most=2, keep=False)
    handles = [cache.allocate()[0] for _ in range(2)]
    chunk = RequestPlan(np.arange(3, 10), 0, handles[0], complete=False, predict=2)
    tree = RequestPlan(np.array([5]), 0, handles[1], tree=DraftTree.from_paths([[1, 2], [3]]))
    result = runner.launch(StepPlan([chunk, tree], top_k=4), cache).result()
    assert result.num_rows == 11
    assert result.starts.tolist() == [0, 7]
    assert (result.choices >= 0).tolist() == [False] * 5 + [True] * 6
    for request, rows in ((0, np.array([5, 6])), (1, np.arange(4))):
        logits = result.logits(request, rows)
        assert logits.argmax(-1).tolist() == result.choices[result.starts[request] + rows].tolist()
        assert torch.equal(
            logits.float().topk(4).indices.int(), torch.from_numpy(result.top_ids[result.starts[request] + rows])
        )
    only_chunks = StepPlan([replace(chunk, predict=0), replace(chunk, kv=handles[1], predict=0, pending=np.arange(2))])
    assert (runner.launch(only_chunks, cache).result().choices == -1).all()


def test_the_first_flat_step_is_not_timed_and_costs_are_of_any_rows() -> None:
    """It runs the self-check."""
    model = BoundModel(tiny_model("llama"))
    runner: Any = create_runner(model)
    assert isinstance(runner, FlatRunner)
    assert runner.limits.padded
    plan = StepPlan([RequestPlan(np.array([1]), 0, tree=DraftTree.from_paths([[1, 2]]))])
    assert [runner.launch(plan, one_slot(8)).result().is_warm for _ in range(2)] == [False, True]
    assert not runner.limits.padded
    limits = measure_steps(runner, own_cache(runner, 512)).limits
    assert not limits.captured
    assert not limits.tiles


def test_a_model_that_is_changed_between_calls_is_checked_again() -> None:
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model)
    right, expected = right_drafts(model, PROMPTS)
    runner: Any = lm.engine.runner
    for change in (
        lambda: None,
        lambda: model.set_attn_implementation("eager"),
        lambda: model.to(torch.float64),
        lambda: model.set_attn_implementation("sdpa"),
    ):
        change()
        done = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=right)
        assert [one.token_ids for one in done] == expected
        assert not runner.limits.padded
        assert runner.model.attention == model.config._attn_implementation
    model.model.layers[0].self_attn = OwnAttention(model.model.layers[0].self_attn)
    expected = right_drafts(model, PROMPTS)[1]
    assert [one.token_ids for one in lm.generate(PROMPTS, max_new_tokens=NEW, strategy="lookahead")] == expected
    assert runner.limits.padded


class OwnAttention(torch.nn.Module):
    """Attention that needs keys in the shape of a batch, and looks at no interface."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inner.config = copy.deepcopy(inner.config)
        self.inner.config._attn_implementation = "sdpa"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_thread_may_use_the_model_during_a_step(attention: str) -> None:
    model = tiny_model("llama", torch.float32, attention=attention)
    bound = BoundModel(model)
    ids = torch.tensor(random_prompts(9, 9, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = model(ids, attention_mask=mask).logits
    found: list[torch.Tensor] = []

    def meanwhile(_: Any, __: Any, ___: Any) -> None:
        if not found:
            found.append(torch.empty(0))
            thread = threading.Thread(target=lambda: found.append(model(ids, attention_mask=mask).logits))
            thread.start()
            thread.join()

    hook = model.model.layers[0].register_forward_hook(meanwhile)
    plan = check_plan(bound.vocab_size)
    logits = flat_logits(bound, plan, taken_slots(2, 64))
    hook.remove()
    assert torch.equal(found[1], expected)
    assert torch.equal(flat_logits(bound, plan, taken_slots(2, 64)), logits)
