"""Requests whose prompt transformers runs: paused, retried, cancelled, concurrent, and next to ordinary ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

import lookfar
from helpers import flat_lm, partly_right, wait_until
from lookfar import LM
from lookfar.engine.prepared import prepare_prompts
from lookfar.models.first_forward import FirstForward
from lookfar.models.support import examine
from media import Tensors, media_model, media_prompts
from sources import source_model, sources

NEW = 24


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return media_model("qwen2_vl")


@pytest.fixture(scope="module")
def hybrid() -> PreTrainedModel:
    return media_model("qwen3_5")


@pytest.fixture(scope="module")
def bart() -> PreTrainedModel:
    return source_model("bart")


def prompt_of(model: PreTrainedModel, seed: int = 0) -> Tensors:
    """A prompt with an image, or a source."""
    if model.config.is_encoder_decoder:
        return sources("bart", [9 + seed])
    return media_prompts(model.config.model_type, [1], seed=seed)


def expected_of(model: PreTrainedModel, inputs: Tensors, new: int = NEW) -> list[int]:
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, num_beams=1, pad_token_id=0)
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    tokens: list[int] = out[0, start:].tolist()
    return tokens


def given(model: PreTrainedModel, inputs: Tensors) -> Any:
    return inputs["input_ids"][0].tolist() if model.config.is_encoder_decoder else inputs


def answer(done: Any) -> list[int]:
    tokens: list[int] = (done[0] if isinstance(done, list) else done).token_ids
    return tokens


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count first passes."""
    ran: list[int] = []
    run = FirstForward._run

    def counted(self: FirstForward) -> Any:
        ran.append(1)
        return run(self)

    monkeypatch.setattr(FirstForward, "_run", counted)
    return ran


@pytest.mark.parametrize("name", ["qwen", "hybrid", "bart"])
def test_a_slow_reader_loses_nothing(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(name)
    inputs, ran = prompt_of(model), passes(monkeypatch)
    expected = expected_of(model, inputs)
    monkeypatch.setattr("lookfar.engine.driver.QUEUE_LIMIT", 4)
    lm = LM(model, strategy="none")
    stream = lm.stream(given(model, inputs), max_new_tokens=NEW)
    tokens = list(next(stream).token_ids)
    wait_until(lambda: bool(lm.engine.scheduler.paused))
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == expected
    assert len(ran) == 1  # its KV was swapped, not computed again


@pytest.mark.parametrize("name", ["qwen", "hybrid", "bart"])
def test_a_failed_step_runs_the_prompt_again(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(name)
    prompts = [prompt_of(model), prompt_of(model, 3)]
    expected = [expected_of(model, inputs) for inputs in prompts]
    lm, ran = LM(model, strategy="suffix", budget=4), passes(monkeypatch)
    launch, count = lm.engine.runner.launch, iter(range(100))

    def fail_once(plan: Any, cache: Any) -> Any:
        if next(count) == 3:
            raise RuntimeError("the step is lost")
        return launch(plan, cache)

    monkeypatch.setattr(lm.engine.runner, "launch", fail_once)
    requests = [lm.requests(given(model, inputs), max_new_tokens=NEW)[0][0] for inputs in prompts]
    assert [done.token_ids for done in lm.run(requests)] == expected
    assert len(ran) == 4  # each prompt twice


def test_an_error_of_the_pass_ends_its_requests_only(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LM(qwen, strategy="none")
    text = list(range(10, 30))
    expected = lm.generate(text, max_new_tokens=NEW).token_ids
    ran = iter(range(10))
    run = FirstForward._run
    monkeypatch.setattr(FirstForward, "_run", lambda self: 1 / 0 if next(ran) == 0 else run(self))
    stream = lm.stream(text, max_new_tokens=NEW)
    tokens = list(next(stream).token_ids)
    with pytest.raises(ZeroDivisionError):
        lm.generate(prompt_of(qwen), max_new_tokens=NEW)
    assert tokens + [token for chunk in stream for token in chunk.token_ids] == expected
    assert answer(lm.generate(prompt_of(qwen), max_new_tokens=NEW)) == expected_of(qwen, prompt_of(qwen))


@pytest.mark.parametrize("name", ["qwen", "hybrid", "bart"])
def test_threads_with_prompts_of_their_own(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    prompts = [prompt_of(model, seed) for seed in range(4)]
    expected = [expected_of(model, inputs) for inputs in prompts]
    lm = LM(model, budget=6)
    found: dict[int, list[int]] = {}

    def use(i: int) -> None:
        found[i] = answer(lm.generate(given(model, prompts[i]), max_new_tokens=NEW))

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(4)] == expected


def test_an_image_is_never_taken_for_another_one(qwen: PreTrainedModel) -> None:
    """The same tokens with another image: nothing of the KV is reused, whatever was cached before."""
    one, other = prompt_of(qwen), prompt_of(qwen)
    other["pixel_values"] = prompt_of(qwen, 7)["pixel_values"]
    lm = LM(qwen, budget=6)
    for inputs in (one, other, one):
        done = lm.generate(inputs, max_new_tokens=NEW, reuse=True)[0]
        assert done.token_ids == expected_of(qwen, inputs)
        assert done.stats.reused_tokens == 0
    ids = one["input_ids"][0].tolist()  # as mere text
    plain = lm.generate(ids, max_new_tokens=NEW, reuse=True)
    assert plain.stats.reused_tokens == 0
    assert lm.generate([*ids, *plain.token_ids], max_new_tokens=4, reuse=True).stats.reused_tokens > len(ids)


@pytest.mark.parametrize("name", ["qwen", "hybrid", "bart"])
def test_cancelling(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    lm, inputs = LM(model, strategy="none"), prompt_of(model)
    stream = lm.stream(given(model, inputs), max_new_tokens=NEW)
    next(stream)
    stream.close()
    wait_until(lambda: lm.engine.scheduler.is_idle)
    assert answer(lm.generate(given(model, inputs), max_new_tokens=NEW)) == expected_of(model, inputs)


def test_images_and_texts_share_steps(qwen: PreTrainedModel) -> None:
    """Positions belong to a request: an image moves those of its own text only."""
    inputs, text = prompt_of(qwen), list(range(20, 47))
    lm = LM(qwen, strategy="none")
    alone = lm.generate(text, max_new_tokens=NEW).token_ids
    requests = [lm.requests(prompt, max_new_tokens=NEW)[0][0] for prompt in (text, inputs, text)]
    done = lm.run(requests)
    assert [one.token_ids for one in done] == [alone, expected_of(qwen, inputs), alone]


def test_position_deltas_of_a_model_do_not_matter(qwen: PreTrainedModel) -> None:
    """transformers keeps them on the model, for the call that came last."""
    inputs = prompt_of(qwen)
    expected = expected_of(qwen, inputs)
    lm = LM(qwen, strategy="none")
    stream = lm.stream(inputs, max_new_tokens=NEW)
    tokens = list(next(stream).token_ids)
    qwen.model.rope_deltas = torch.tensor([[1000]])
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == expected


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "qwen3_vl"])
def test_flat_steps_of_cuda_graphs(family: str) -> None:
    """The rows of captured steps, here as they run without a GPU."""
    model = media_model(family)
    inputs = media_prompts(family, [1, 0, 2])
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    expected = out[:, inputs["input_ids"].shape[1] :].tolist()
    rows = zip(inputs["input_ids"], inputs["attention_mask"], expected, strict=True)
    drafts = partly_right([ids[mask.bool()].tolist() + new for ids, mask, new in rows])
    done = flat_lm(model).generate(inputs, max_new_tokens=NEW, strategy=drafts)
    assert [one.token_ids for one in done] == expected
    assert done[0].stats.tokens_per_step > 1.3


@pytest.mark.parametrize("name", ["qwen", "bart"])
def test_automatic_budgets_and_warm_up(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    inputs = prompt_of(model)
    lm = LM(model)
    lm.warmup(requests=2, length=64)
    assert answer(lm.generate(given(model, inputs), max_new_tokens=NEW)) == expected_of(model, inputs)


def test_inference_mode(qwen: PreTrainedModel) -> None:
    inputs = prompt_of(qwen)
    expected = expected_of(qwen, inputs)
    with torch.inference_mode():
        out = qwen.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, custom_generate=lookfar.generate, budget=6
        )
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == expected


def test_a_pass_is_shared_and_its_results_are_handed_out_once(bart: PreTrainedModel) -> None:
    prompts = prepare_prompts(bart, sources("bart", [5, 9]), 96)
    call = prompts[0].first.call  # type: ignore[union-attr]
    (first,) = call.take([0])
    assert call._rows.keys() == {1}
    call.take([1])
    assert not call._rows
    (again,) = call.take([0])
    torch.testing.assert_close(again.logits, first.logits)


def test_a_model_that_needs_more_than_the_kv_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may read its image in every step: the first prompt of that kind is compared with transformers' step."""
    model = media_model("llava")
    inputs = media_prompts("llava", [1])
    expected = expected_of(model, inputs)
    forward = model.model.language_model.forward

    def with_more(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if out.last_hidden_state.shape[1] == 1 and kwargs["past_key_values"].__class__.__name__ == "DynamicCache":
            out.last_hidden_state = -out.last_hidden_state  # stands for what only `generate` gives to its steps
        return out

    monkeypatch.setattr(model.model.language_model, "forward", with_more)
    own = expected_of(model, inputs)
    assert own != expected
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):  # one warning
        if not _:
            with pytest.warns(UserWarning, match="it decodes with more than the KV"):
                out = model.generate(**inputs, **options, custom_generate=lookfar.generate)
        else:
            out = model.generate(**inputs, **options, custom_generate=lookfar.generate)
        assert out[0, inputs["input_ids"].shape[1] :].tolist() == own
    lm = LM(model)
    with pytest.raises(lookfar.LookfarError, match="send it again"):
        lm.generate(inputs, max_new_tokens=NEW)
    with pytest.warns(UserWarning, match="it decodes with more than the KV"):
        assert answer(lm.generate(inputs, max_new_tokens=NEW)) == own


def test_cross_attention_to_images_uses_the_fallback() -> None:
    support = examine(CONFIG_MAPPING["mllama"]())
    assert support.mode == "none"
    assert "cross-attention" in support.reason
