"""The prior holds what the model predicts after single tokens, and never changes an output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from families import tiny_model
from helpers import flat_lm, random_prompts, reference, wait_until
from lookfar import LM
from lookfar.engine.prior import PriorBuilder, prior_context


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.engine.prior.cache_dir", lambda: tmp_path)


def priors_of(lm: LM) -> PriorBuilder:
    assert lm.engine.priors is not None
    return lm.engine.priors


def complete(lm: LM) -> None:
    while lm.driver.call(lm.engine.extend_prior):
        pass


@pytest.mark.parametrize("make", [LM, flat_lm])
def test_it_holds_the_models_predictions(make: type[LM]) -> None:
    model = tiny_model("llama")
    lm = make(model)
    complete(lm)
    prior, first = priors_of(lm).prior, prior_context(lm.engine.runner.model, [])[0]
    assert prior.is_complete
    tokens = torch.tensor([0, 1, 5, prior.count - 1])
    ids = torch.stack([torch.full_like(tokens, first), tokens], 1).to(model.device)
    with torch.no_grad():
        logits = model(ids).logits[:, -1].float().cpu()
    expected = logits.topk(prior.ids.shape[1], -1)
    assert prior.ids[tokens].tolist() == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor(prior.logits[tokens]), expected.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [LM, flat_lm])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3}])
def test_outputs_stay_the_same(make: type[LM], sampling: dict[str, object]) -> None:
    prompts = random_prompts(12, 30, 5)
    lm = make(tiny_model("llama"))
    before = [out.token_ids for out in lm.generate(prompts, max_new_tokens=24, **sampling)]
    complete(lm)
    lm.forget()
    after = [out.token_ids for out in lm.generate(prompts, max_new_tokens=24, **sampling)]
    assert before == after
    if not sampling:
        assert after == [reference(lm.model, prompt, 24) for prompt in prompts]


def test_a_second_process_reads_it() -> None:
    lm = LM(tiny_model("llama"))
    lm.warmup()
    count = priors_of(lm).prior.count
    assert priors_of(lm).file.exists()
    again = LM(tiny_model("llama"))
    assert priors_of(again).prior.count == count
    again.generate([1, 2, 3], max_new_tokens=2)
    assert (again.draft_state.sources.recycle_table.arrays.token_ids[:count, 0] >= 0).all()


def test_other_weights_have_another_prior() -> None:
    model = tiny_model("llama")
    lm = LM(model)
    complete(lm)
    before = priors_of(lm).file
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    lm.generate([1, 2, 3], max_new_tokens=2)
    assert priors_of(lm).file != before
    assert priors_of(lm).prior.count == 0


def test_warmup_can_leave_it_out() -> None:
    lm = LM(tiny_model("llama"))
    lm.warmup(prior=False)
    assert priors_of(lm).prior.count == 0


def test_models_without_trees_have_none() -> None:
    lm = LM(tiny_model("mamba2"))
    assert not priors_of(lm).has_work


def test_an_idle_driver_computes_it(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    lm.driver.works_when_idle = True
    lm.generate([1, 2, 3], max_new_tokens=2)
    wait_until(lambda: priors_of(lm).prior.is_complete)
    lm.generate([1, 2, 3], max_new_tokens=2)


def test_requests_wait_for_one_chunk_at_the_most(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    with lm.stream([1, 2, 3], max_new_tokens=64) as stream:
        next(iter(stream))
        assert not lm.driver.call(lm.engine.extend_prior)  # a request is running
        assert priors_of(lm).prior.count == 0


def test_kv_that_is_kept_for_later_requests_stays() -> None:
    lm = flat_lm(tiny_model("llama"), max_batch=1)
    prompt = random_prompts(12)[0]
    first = lm.generate(prompt, max_new_tokens=8, reuse=True)
    lm.driver.call(lm.engine.extend_prior)
    second = lm.generate([*prompt, *first.token_ids, 5], max_new_tokens=8, reuse=True)
    assert second.stats.reused_tokens > len(prompt)


def test_captured_steps_stay() -> None:
    lm = flat_lm(tiny_model("llama"), max_batch=3)
    lm.warmup(requests=3, prior=False)
    steps = [id(step) for step in lm.engine.runner._steps]  # type: ignore[attr-defined]
    complete(lm)
    assert priors_of(lm).prior.is_complete
    assert [id(step) for step in lm.engine.runner._steps][: len(steps)] == steps  # type: ignore[attr-defined]
