"""`lm.warmup()` does what first requests would wait for, and changes nothing that anyone can see."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from families import tiny_model
from helpers import flat_lm, random_prompts, random_state, reference
from lookfar import LM
from lookfar.engine import warmup
from lookfar.engine.warmup import warmup_tasks
from lookfar.errors import CapacityError, ConfigError

PROMPTS, NEW = random_prompts(12, 30, 5), 20


def tasks_left(lm: LM, requests: int = 2) -> list[str]:
    examples = lm.requests([1, 2, 1, 2], max_new_tokens=4)[0]
    return [task.text for task in lm.driver.call(lambda: warmup_tasks(lm.engine, examples, requests, 128))]


COMPILED = """
import gc
import sys
from numba.core.registry import CPUDispatcher
from families import tiny_model
from helpers import flat_lm, random_prompts
from lookfar import LM

def compiled():
    every = [one for one in gc.get_objects() if type(one) is CPUDispatcher and one.signatures]
    return {one.py_func.__name__ for one in every if one.py_func.__module__.startswith("lookfar")}

lm = {"LM": LM, "flat_lm": flat_lm}[sys.argv[1]](tiny_model("llama"))
lm.warmup(sampling=True)
known = compiled()
for options in ({}, {"do_sample": True, "seed": 1}, {"strategy": "none"}):
    lm.generate(random_prompts(12, 30, 5), max_new_tokens=20, **options)
print(len(known), sorted(compiled() - known))
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", ["LM", "flat_lm"])
def test_all_host_code_is_compiled(make: str) -> None:
    command = [sys.executable, "-c", COMPILED, make]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    count, left = done.stdout.split(maxsplit=1)
    assert int(count) > 10
    assert left.strip() == "[]"


@pytest.mark.parametrize("make", [LM, flat_lm])
def test_it_is_done_once_and_leaves_no_trace(make: Any) -> None:
    lm, cold = (make(tiny_model("llama", torch.float32), max_batch=2) for _ in range(2))
    state, models = random_state(), len(lm.draft_state.acceptance_models)
    lm.warmup(length=128)
    assert torch.equal(random_state(), state)
    assert len(lm.draft_state.acceptance_models) == models
    assert not lm.draft_state.store.tokens
    assert not lm.engine.speculator.controllers
    assert lm.engine.speculator.costs is not None
    assert lm.engine.speculator.costs.refined == 0
    assert lm.engine.scheduler.is_idle
    assert not lm.engine.cache.order
    assert tasks_left(lm) == []
    for options in ({}, {"strategy": "none"}, {"do_sample": True, "seed": 3}):
        found, expected = (one.generate(PROMPTS, max_new_tokens=NEW, **options) for one in (lm, cold))
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]


def test_after_a_warm_up_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    lm = flat_lm(model, max_batch=2)
    lm.warmup(sampling=True)
    monkeypatch.setattr(lm.engine.runner, "_capture", lambda *_: pytest.fail("captured"))
    for prompts in (PROMPTS[:1], PROMPTS):
        for sampling in ({}, {"do_sample": True, "seed": 1}):
            lm.generate(prompts, max_new_tokens=NEW, **sampling)
        done = lm.generate(prompts, max_new_tokens=NEW, strategy="none")
        assert [one.token_ids for one in done] == [reference(model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("strategy", ["auto", "suffix", "none"])
def test_the_first_request_finds_the_tables_that_it_needs(strategy: str) -> None:
    lm = LM(tiny_model("llama", torch.float32), strategy=strategy)
    lm.warmup()
    assert lm.draft_state.sources.has_table == (strategy == "auto")
    lm.forget()
    assert lm.draft_state.sources.has_table == (strategy == "auto")


def test_a_changed_model_is_warmed_up_again() -> None:
    model = tiny_model("llama", torch.float32)
    lm = flat_lm(model)
    lm.warmup(requests=2, length=128)
    model.double()
    left = tasks_left(lm)
    assert any("Capturing" in text for text in left)
    assert "Decoding a few tokens" in left
    lm.warmup(requests=2, length=128)
    assert tasks_left(lm) == []
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)


def test_requests_of_other_threads_run_meanwhile() -> None:
    model = tiny_model("llama")
    lm = flat_lm(model, max_batch=3)
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    found: list[list[list[int]]] = []

    def decode() -> None:
        for _ in range(4):
            found.append([done.token_ids for done in lm.generate(PROMPTS, max_new_tokens=NEW)])

    threads = [threading.Thread(target=decode), threading.Thread(target=lm.warmup), threading.Thread(target=lm.warmup)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    lm.warmup()
    assert [done.token_ids for done in lm.generate(PROMPTS, max_new_tokens=NEW)] == expected


@pytest.mark.parametrize("after", [0, 1, 7])
def test_it_can_be_interrupted(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in the thread that waits, with any number of tasks done."""
    model = tiny_model("llama")
    lm = flat_lm(model, max_batch=2)
    call, calls = lm.driver.call, []

    def interrupted(function: Any) -> Any:
        calls.append(function)
        if len(calls) > 1 + after:
            lm.driver.post(function)  # the driver's thread does not notice that nobody waits any more
            raise KeyboardInterrupt
        return call(function)

    monkeypatch.setattr(lm.driver, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.warmup(requests=2, length=128)
    monkeypatch.undo()
    assert lm.generate(PROMPTS[1], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[1], NEW)
    lm.warmup(requests=2, length=128)
    assert tasks_left(lm) == []


def test_an_error_of_a_task_is_raised_and_leaves_a_working_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    lm = flat_lm(model, max_batch=2)
    monkeypatch.setattr(warmup, "rehearse", lambda *_: _fail())
    with pytest.raises(CapacityError, match="no room"):
        lm.warmup()
    assert lm.generate(PROMPTS[1], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[1], NEW)


def _fail() -> None:
    raise CapacityError("no room")


def test_numbers_are_checked() -> None:
    lm = LM(tiny_model("llama"))
    for wrong in ({"requests": -1}, {"length": 0}, {"requests": 1.5}):
        with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
            lm.warmup(**wrong)  # type: ignore[arg-type]


def test_models_with_few_positions_and_models_for_the_fallback() -> None:
    lm = LM(tiny_model("llama", max_position_embeddings=8))
    lm.warmup()
    assert lm.engine.is_rehearsed
    other = LM(tiny_model("llama"))
    other.engine.runner.model.refuse("it cannot roll back")
    other.warmup()
    assert not other.engine.is_rehearsed
