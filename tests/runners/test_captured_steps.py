"""Which captured step runs a plan, what stands in for a missing one, and when that one is captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from families import tiny_model
from helpers import flat_lm, oracle, random_prompts, reference, wait_until
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.engine.request import Request
from lookfar.lm import LM
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import one_slot
from lookfar.runners.base import StepShape
from lookfar.runners.cuda_graph import captured_steps
from lookfar.runners.cuda_graph.runner import SIZES, CudaGraphRunner
from lookfar.testing import run_requests

PROMPTS, NEW = random_prompts(12, 30, 5), 20


@pytest.fixture
def runner() -> CudaGraphRunner:
    runner = CudaGraphRunner(BoundModel(tiny_model("llama", torch.float32), pack=False))
    assert not runner.why_unavailable()
    return runner


def plan_of(rows: int, k: int, shared: bool = True) -> StepPlan:
    plan = StepPlan([RequestPlan(np.arange(rows), 0)], k)
    plan.shared = shared
    return plan


def captured(runner: CudaGraphRunner) -> set[StepShape]:
    return {StepShape(step.rows, step.batch, k) for step in runner._steps for k in step.captured}


def test_a_larger_step_stands_in_while_the_engine_is_shared(runner: CudaGraphRunner) -> None:
    cache = one_slot(64)
    expected = runner.launch(plan_of(5, 3, shared=False), one_slot(64)).result()
    runner.launch(plan_of(16, 8), cache).result()  # nothing larger is there: captured at once
    assert captured(runner) == {(16, 1, 8)}
    for _ in range(2):
        found = runner.launch(plan_of(5, 3), cache).result()
    assert captured(runner) == {(16, 1, 8)}
    assert runner.next_wanted() == (8, 1, 3)
    assert found.num_rows == 16
    assert not found.is_warm
    assert found.choices[0].tolist() == expected.choices[0].tolist()
    assert found.top_ids is not None
    assert found.top_logits is not None
    assert expected.top_ids is not None
    assert expected.top_logits is not None
    assert found.top_ids[0].tolist() == expected.top_ids[0].tolist()  # three predictions, not eight
    assert np.allclose(found.top_logits[0], expected.top_logits[0])
    none = runner.launch(plan_of(2, 0), cache).result()
    assert none.top_ids is None
    assert (none.num_rows, none.is_warm) == (16, False)
    assert runner.launch(plan_of(9, 0), cache).result().is_warm  # predictions that nobody asked for do not matter


def test_a_request_alone_does_not_wait(runner: CudaGraphRunner) -> None:
    cache = one_slot(64)
    runner.launch(plan_of(16, 8, shared=False), cache).result()
    first, second = (runner.launch(plan_of(5, 3, shared=False), cache).result() for _ in range(2))
    assert captured(runner) == {(16, 1, 8), (8, 1, 3)}
    assert (first.num_rows, first.is_warm) == (8, False)
    assert (second.num_rows, second.is_warm) == (8, True)
    assert runner.next_wanted() is None


def test_smaller_steps_do_not_stand_in(runner: CudaGraphRunner) -> None:
    """Neither with fewer rows, nor with room for fewer requests, nor with fewer predictions."""
    cache = flat_lm(tiny_model("llama", torch.float32)).engine.cache
    cache.reserve(8, 64, most=8, keep=False)
    for shape in (StepShape(8, 8, 8), StepShape(32, 1, 8), StepShape(32, 4, 0)):
        runner.capture(cache, shape)
    assert runner._steps.larger(StepShape(16, 4, 8)) is None
    step, k = runner._steps.larger(StepShape(16, 2, 0)) or (None, 0)
    assert (step and (step.rows, step.batch), k) == ((32, 4), 0)


def test_patience_ends(runner: CudaGraphRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is never idle is stalled once rather than slow for ever."""
    cache = one_slot(64)
    runner.launch(plan_of(16, 8), cache).result()
    runner.launch(plan_of(2, 8), cache).result()
    spent = runner._steps.wanted[StepShape(2, 1, 8)]
    assert spent > 0
    monkeypatch.setattr(captured_steps, "PATIENCE", spent)
    assert runner.launch(plan_of(2, 8), cache).result().num_rows == 2
    assert runner.next_wanted() is None


def test_a_failed_capture_leaves_the_step_to_larger_ones(
    runner: CudaGraphRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = one_slot(64)
    runner.launch(plan_of(16, 8), cache).result()
    runner.launch(plan_of(2, 8), cache).result()
    real = runner._capture

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(runner, "_capture", fail)
    runner.capture(cache, StepShape(2, 1, 8))
    assert runner.next_wanted() is None
    assert StepShape(2, 1, 8) not in runner.missing(cache, 1, [8])
    for shared in (True, False):
        assert runner.launch(plan_of(2, 8, shared), cache).result().num_rows == 16
        assert runner.launch(plan_of(4, 8, shared=False), cache).result().num_rows == 16
    assert runner.next_wanted() is None
    monkeypatch.setattr(runner, "_capture", real)
    other = one_slot(64)  # other buffers: everything starts again
    runner.launch(plan_of(2, 8), other).result()
    assert captured(runner) == {(2, 1, 8)}


def test_other_buffers_and_a_changed_model_drop_what_is_wanted(runner: CudaGraphRunner) -> None:
    cache = one_slot(64)
    for change in (lambda: runner.capture(one_slot(64), StepShape(1, 1, 0)), lambda: runner.refresh(everything=True)):
        runner.launch(plan_of(16, 8), cache).result()
        runner.launch(plan_of(2, 8), cache).result()
        assert runner.next_wanted() == (2, 1, 8)
        change()
        assert runner.next_wanted() is None


def test_weights_that_were_moved_are_not_captured(runner: CudaGraphRunner) -> None:
    cache = one_slot(64)
    embedding = runner.model.model.get_input_embeddings().weight
    embedding.data = embedding.data.clone()
    runner.capture(cache, StepShape(2, 1, 8))
    assert not captured(runner)


def test_after_the_missing_steps_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32)
    lm = flat_lm(model, max_batch=5)
    lm.engine.cache.reserve(5, 256, most=5, keep=False)
    runner: Any = lm.engine.runner
    shapes = runner.missing(lm.engine.cache, 5, [8])
    assert [shape.rows for shape in shapes] == sorted((shape.rows for shape in shapes), reverse=True)
    assert {shape.rows for shape in shapes} == set(SIZES)
    assert {shape.rows for shape in shapes if shape.predictions == 0} == {1, 2, 4, 8}  # one row for each request
    for shape in shapes:
        runner.capture(lm.engine.cache, shape)
    assert not runner.missing(lm.engine.cache, 5, [8])
    assert runner.missing(lm.engine.cache, 5, [24])
    monkeypatch.setattr(runner, "_capture", lambda *_: pytest.fail("captured"))
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    right = oracle([prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)])
    for strategies in ((right,), ()):
        requests = [Request(prompt, NEW, strategies=strategies) for prompt in PROMPTS]
        assert [result.token_ids for result in run_requests(lm.engine, requests)] == expected


@pytest.mark.parametrize("allowed", [True, False])
def test_wanted_steps_are_captured_when_the_driver_is_idle(allowed: bool) -> None:
    model = tiny_model("llama", torch.float32)
    lm = flat_lm(model, max_batch=3)
    lm.driver.works_when_idle = allowed
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    assert [done.token_ids for done in lm.generate(PROMPTS, max_new_tokens=NEW, strategy="none")] == expected
    runner: Any = lm.engine.runner
    if not allowed:  # the caller may use the model itself now
        assert runner.next_wanted() is not None
        return
    wait_until(lambda: runner.next_wanted() is None)
    before = captured(runner)
    assert StepShape(4, 3, 0) in before  # three requests, one row each
    assert [done.token_ids for done in lm.generate(PROMPTS, max_new_tokens=NEW, strategy="none")] == expected
    assert captured(runner) == before


def test_an_idle_driver_with_wishes_is_collected_and_closed() -> None:
    lm: LM | None = flat_lm(tiny_model("llama", torch.float32), max_batch=3)
    assert lm is not None
    lm.driver.works_when_idle = True
    lm.generate(PROMPTS, max_new_tokens=4, strategy="none")
    thread = lm.driver._thread
    assert thread is not None
    lm = None
    wait_until(lambda: not thread.is_alive())
