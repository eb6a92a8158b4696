"""Packed steps give every family its own tokens: captured on a GPU; on a CPU the same steps with the twin."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import lookfar
from conftest import random_prompts, reference
from families import DEVICE, TREES, tiny_model
from lookfar.answers import EagerSteps
from lookfar.config import Lookahead
from lookfar.engine import Engine
from lookfar.errors import CapacityError, ConfigError, LookfarWarning, ModelError
from lookfar.gpu import steps_for
from lookfar.gpu.graphs import FIXED_ROWS, CapturedSteps
from lookfar.gpu.memory import GIB, cache_size
from lookfar.model import BoundModel
from lookfar.sequence import Request
from lookfar.tree import Plan
from test_families import NEW, PROMPTS, oracle

# Their attention is code of their own, or adds a bias by place.
NOT_PACKED = {"gpt_neox_japanese", "gptj", "codegen", "bloom", "mpt", "falcon:alibi", "falcon"}
# Packed, but their code asks the host for numbers in between (experts in loops, say).
NOT_CAPTURED = {"aria_text", "gemma3n_text", "jetmoe", "longcat_flash", "phimoe"}
DTYPE = torch.float64 if DEVICE == "cpu" else torch.float32
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def packed_lm(model: Any, **options: Any) -> lookfar.LM:
    """An LM with packed steps, on a CPU too."""
    lm = lookfar.LM(model, prefill_rows=16, **options)
    if DEVICE == "cpu":
        steps = CapturedSteps(lm.engine.model)
        assert not steps.why_not()
        lm.engine.steps = steps
    return lm


@pytest.mark.parametrize("family", sorted(set(TREES) - NOT_PACKED))
def test_families_give_their_own_tokens(family: str) -> None:
    model = tiny_model(family, DTYPE)
    lm = packed_lm(model)
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    told = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    for strategy in ("none", Lookahead(window=4, ngram=4, guesses=4), told):
        single = lm.generate(PROMPTS[1], max_new_tokens=NEW, strategy=strategy)
        batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=strategy)
        assert single.token_ids == expected[1], strategy
        assert [done.token_ids for done in batch] == expected, strategy
    assert all(done.stats.tokens_per_step > 1.8 for done in batch)
    assert lm.engine.steps.room.packed == (DEVICE == "cpu" or family not in NOT_CAPTURED)


@pytest.mark.parametrize("family", sorted(NOT_PACKED))
def test_other_families_are_found_out(family: str) -> None:
    assert CapturedSteps(BoundModel(tiny_model(family, DTYPE), pack=False)).why_not()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampling(temperature: float) -> None:
    model = tiny_model("llama", torch.float32)
    lm, eager = packed_lm(model, max_batch=3), lookfar.LM(model, prefill_rows=16, capture=False, max_batch=3)
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
    deep = lookfar.drafters.scripted.Scripted(lambda ids: [text[len(ids) : len(ids) + 40]])  # type: ignore[attr-defined]
    lm = packed_lm(model)
    eager = lm.engine.steps.eager  # type: ignore[attr-defined]
    taken: list[Plan] = []
    start = eager.start
    eager.start = lambda plan, *rest: taken.append(plan) or start(plan, *rest)
    # The planner keeps trees within reach, so the strategy alone never goes there.
    assert lm.generate(PROMPTS[1], max_new_tokens=60, strategy=deep).token_ids == expected
    assert not taken
    lm.engine.steps.room = EagerSteps.room
    assert lm.generate(PROMPTS[1], max_new_tokens=60, strategy=deep).token_ids == expected
    assert max(plan.width for plan in taken) > 33


def test_kept_rows_are_moved_when_a_slot_changes_hands() -> None:
    """Requests of different lengths leave gaps, reuse what is left and give their cache back."""
    model = tiny_model("llama", DTYPE)
    prompts = random_prompts(5, 9, 13, 7, 21)
    news = [3, 17, 9, 21, 5]
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    told = oracle([prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)])
    lm = packed_lm(model, max_batch=2)
    requests = [
        Request(prompt, new, strategies=(told,), export=True) for prompt, new in zip(prompts, news, strict=True)
    ]
    done = lm.engine.run(requests)
    assert [sequence.output for sequence in done] == expected
    for sequence in done:
        assert sequence.exported is not None
        ids = torch.tensor([sequence.ids[:-1]], device=model.device)
        cache = model(ids, use_cache=True).past_key_values
        for (keys, values), layer in zip(sequence.exported, cache.layers, strict=True):
            assert torch.allclose(keys, layer.keys, atol=1e-4)
            assert torch.allclose(values, layer.values, atol=1e-4)
    longer = prompts[1] + expected[1] + prompts[0]
    again = lm.generate(longer, max_new_tokens=12, reuse=True, strategy="none")
    assert again.token_ids == reference(model, longer, 12)


@pytest.mark.parametrize("room", [512, 24])
def test_prompts_are_read_while_others_decode(room: int) -> None:
    """And what moves into a gap brings along what is still to be moved among its cells."""
    model = tiny_model("llama", DTYPE)
    prompts, news = random_prompts(5, 9, 40, 7, 21, 30), [3, 17, 9, 21, 5, 8]
    expected = [reference(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    told = oracle([prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)])
    lm = packed_lm(model, max_batch=3)
    lm.engine.steps.room = replace(lm.engine.steps.room, rows=room)
    mixed = 0
    start = lm.engine.steps.start

    def watched(plan: Plan, *rest: Any) -> Any:
        nonlocal mixed
        assert plan.batch == len(lm.engine.active)  # nobody waits
        assert sum(plan.lengths) <= room
        assert sum(len(rows.chain) - 1 for rows in plan.sequences) < 16  # the most rows of prompts
        reading = {len(rows.chain) > 1 for rows in plan.sequences}
        mixed += len(reading) > 1
        return start(plan, *rest)

    lm.engine.steps.start = watched  # type: ignore[method-assign]
    for strategies in ((told,), (), (Lookahead(window=3, ngram=3, guesses=2),)):  # guesses, none, riders
        done = lm.engine.run([Request(p, n, strategies=strategies) for p, n in zip(prompts, news, strict=True)])
        assert [sequence.output for sequence in done] == expected
    assert mixed > 5


def test_a_request_that_is_not_packed_is_not_padded_to_the_width_of_prompts() -> None:
    model = tiny_model("llama", DTYPE)
    prompts = random_prompts(40, 30, 35)
    embeds = model.get_input_embeddings()(torch.tensor(prompts[1], device=model.device)).detach()
    lm = packed_lm(model, max_batch=3)
    fed: list[int] = []
    start = lm.engine.steps.start
    lm.engine.steps.start = lambda plan, *rest: fed.append(plan.batch * plan.width) or start(plan, *rest)  # type: ignore[method-assign,func-returns-value]
    requests = [Request(prompt, 6) for prompt in prompts]
    requests[1] = replace(requests[1], embeds=embeds)
    done = lm.engine.run(requests)
    assert [sequence.output for sequence in done] == [reference(model, prompt, 6) for prompt in prompts]
    assert max(fed) <= 16


def test_fixed_rows_leave_the_root_to_a_step_of_its_own() -> None:
    """What `exact=True` plans, without a GPU: prompts alone, then steps of one size."""
    model = tiny_model("llama", DTYPE)
    bound = BoundModel(model, pack=False)
    steps = CapturedSteps(bound, exact=True)
    assert not steps.why_not()
    engine = Engine(bound, 3, prefill_rows=16, steps=steps)
    sizes: list[tuple[int, bool]] = []
    start = steps.start

    def watched(plan: Plan, *rest: Any) -> Any:
        sizes.append((steps.fed(plan), all(rows.complete for rows in plan.sequences)))
        assert plan.batch == 1 or sizes[-1][1]
        assert all(len(rows.chain) == 1 for rows in plan.sequences if rows.complete)
        return start(plan, *rest)

    with pytest.raises(ConfigError, match="max_batch must be at most 64 with exact=True, not 65"):
        Engine(bound, 65, steps=steps)
    steps.start = watched  # type: ignore[method-assign]
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    told = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    done = engine.run([Request(prompt, NEW, strategies=(told,)) for prompt in PROMPTS])
    assert [sequence.output for sequence in done] == expected
    assert {rows for rows, complete in sizes if complete} == {FIXED_ROWS}
    with pytest.raises(ConfigError, match="room for 64 rows here and the window of this strategy takes 120"):
        engine.check(Request([1], 5, strategies=(Lookahead(),)))


def test_a_model_that_cannot_be_captured_warns_once_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", DTYPE)
    lm = packed_lm(model)
    steps: Any = lm.engine.steps
    monkeypatch.setattr(steps, "_capture", lambda *_: (_ for _ in ()).throw(RuntimeError("no graphs. Sorry.")))
    with pytest.warns(LookfarWarning, match=r"llama runs without captured steps, which is slower: no graphs\.$"):
        done = lm.generate(PROMPTS[0], max_new_tokens=NEW)
    assert done.token_ids == reference(model, PROMPTS[0], NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate(PROMPTS[0], max_new_tokens=2)
    other = CapturedSteps(lm.engine.model, exact=True)
    monkeypatch.setattr(other, "_capture", lambda *_: (_ for _ in ()).throw(RuntimeError("no graphs")))
    with pytest.raises(ModelError, match="exact=True needs captured steps, which failed: no graphs"):
        Engine(lm.engine.model, steps=other).run([Request([1, 2], 3)])


def test_weights_that_were_moved_are_noticed() -> None:
    model = tiny_model("llama", DTYPE)
    lm = packed_lm(model)
    lm.generate(PROMPTS[0], max_new_tokens=3)
    model.to(torch.float16)
    with pytest.raises(ModelError, match="weights were moved after its steps were captured"):
        lm.generate(PROMPTS[0], max_new_tokens=3)


@pytest.mark.skipif(DEVICE != "cpu", reason="about machines without a GPU")
@pytest.mark.parametrize("option", ["capture", "compile", "exact"])
def test_options_for_a_gpu_are_refused_elsewhere(option: str) -> None:
    model = tiny_model("llama", DTYPE)
    with pytest.raises(ConfigError, match=f"{option}=True cannot be had for this model: it is not on a CUDA device"):
        lookfar.LM(model, **{option: True})
    with pytest.raises(ConfigError, match="leave capture=False away"):
        lookfar.LM(model, capture=False, exact=True)
    assert isinstance(steps_for(BoundModel(model), None, False, False), EagerSteps)


def test_the_cache_is_sized_from_what_is_free() -> None:
    cell = 1 << 17  # as of Llama-3-8B
    assert cache_size(1, 700, 8, cell, GIB, 100 * GIB) == (8, 1024)
    assert cache_size(1, 5000, 8, cell, GIB, 100 * GIB) == (8, 8192)
    assert cache_size(2, 5000, 8, cell, GIB, 4 * GIB) == (2, 5056)  # no more than needed
    with pytest.raises(CapacityError, match=r"2 sequences of 5056 tokens need 1\.2 GiB, and 1\.0 GiB are free: lower"):
        cache_size(2, 5000, 8, cell, GIB, 2 * GIB)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_text_does_not_depend_on_what_was_guessed(dtype: torch.dtype) -> None:
    """Random weights have many near-ties, so a single bit would show."""
    model = tiny_model("llama", dtype, hidden_size=128, num_hidden_layers=4, head_dim=32, intermediate_size=256)
    lm = lookfar.LM(model, exact=True, max_batch=4)
    prompts = random_prompts(5, 40, 70, 130, 31, 64, 3, 90)
    none = [lm.generate(prompt, max_new_tokens=100, strategy="none").token_ids for prompt in prompts]
    told = oracle([prompt + tokens for prompt, tokens in zip(prompts, none, strict=True)])
    for strategy in ("auto", told, "recycle"):
        budget = 32 if strategy == "recycle" else None
        lm.forget()
        single = [lm.generate(p, max_new_tokens=100, strategy=strategy, budget=budget) for p in prompts]
        batch = lm.generate(prompts, max_new_tokens=100, strategy=strategy, budget=budget)
        assert [done.token_ids for done in single] == none
        assert [done.token_ids for done in batch] == none


@needs_gpu
def test_compiled_layers_on_the_gpu() -> None:
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model, compile=True)
    for prompt in PROMPTS:
        assert lm.generate(prompt, max_new_tokens=NEW).token_ids == reference(model, prompt, NEW)
    assert lm.engine.steps.graph_bytes > 0  # type: ignore[attr-defined]


@needs_gpu
def test_a_cache_that_does_not_fit_is_refused_before_it_is_made() -> None:
    lm = lookfar.LM(tiny_model("llama", torch.float32, max_position_embeddings=1 << 30))
    with pytest.raises(CapacityError, match="GiB are free"):
        lm.generate([1, 2, 3], max_new_tokens=1 << 29)


def test_copies_and_saved_models_know_nothing_of_it(tmp_path: Any) -> None:
    model = tiny_model("llama", torch.float32)
    lm = packed_lm(model)
    expected = lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
    clone = copy.deepcopy(model)
    assert reference(clone, PROMPTS[0], NEW) == expected
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).to(model.device)
    assert reference(again, PROMPTS[0], NEW) == expected
