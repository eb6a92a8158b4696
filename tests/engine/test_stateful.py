"""Random histories of an engine and of a driver: every output equals its single run, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import LogitsProcessor, PreTrainedModel

from families import tiny_model
from helpers import random_prompts, wait_until
from lookfar import LM, Stream
from lookfar.engine import driver as driver_module
from lookfar.engine.outputs import StepOutput

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(12, 30, 1, 21, 45)
STRATEGIES = ("none", "auto", "suffix", "jacobi", "lookahead", "auto+trie+lookahead")
SAMPLING: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.1, "seed": 4}, {"temperature": 0.8, "seed": 9})
SETTINGS = settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck))


class BrokenDeviceError(RuntimeError):
    """Raised by a forward pass."""


class Failing(LogitsProcessor):
    """Changes nothing, and raises an error when it is called for the n-th time."""

    row_wise = True

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.error = ArithmeticError(f"after {calls} calls")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return scores


@cache
def model(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family)


@cache
def expected(prompt: int, new: int, sampling: int, family: str = "llama") -> list[int]:
    """The tokens of `model.generate` alone."""
    ids = torch.tensor([PROMPTS[prompt]], device=model(family).device)
    arguments = dict(SAMPLING[sampling])
    with torch.random.fork_rng():
        torch.manual_seed(arguments.pop("seed", 0))
        options = {"do_sample": bool(arguments), "pad_token_id": 0, **arguments}
        out = model(family).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
    return out[0, ids.shape[1] :].tolist()


@dataclass
class Expectation:
    """A request that is under way, and what has come of it so far."""

    tokens: list[int]
    error: Exception | None = None  # may be raised by its processor
    got: list[int] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        self.got += output.tokens
        assert self.got == self.tokens[: len(self.got)]
        if output.error is not None:
            assert output.error is self.error or isinstance(output.error, BrokenDeviceError)
        elif output.finish_reason is not None:
            assert output.result is not None
            assert output.result.token_ids == self.got == self.tokens


request_arguments = {
    "prompt": st.integers(0, len(PROMPTS) - 1),
    "new": st.integers(1, 24),
    "sampling": st.integers(0, len(SAMPLING) - 1),
    "strategy": st.sampled_from(STRATEGIES),
    "budget": st.sampled_from([None, 1, 7, 30]),
}


class EngineMachine(RuleBasedStateMachine):
    """One engine with three places, stepped by hand."""

    family = "llama"

    def __init__(self) -> None:
        super().__init__()
        self.lm = LM(model(self.family), max_batch=3, prefill_chunk=16)
        self.engine = self.lm.engine
        self.engine.find_costs()  # not by steps that fail
        self.live: dict[int, Expectation] = {}
        self.fault: str | None = None  # when the next forward pass fails: before it, or after
        self.launch: Callable[..., Any] = self.engine.runner.launch
        self.engine.runner.launch = self.maybe_fail  # type: ignore[method-assign]

    def maybe_fail(self, plan: Any, kv_cache: Any) -> Any:
        fault, self.fault = self.fault, None
        if fault == "before":
            raise BrokenDeviceError
        out = self.launch(plan, kv_cache)
        if fault == "after":
            raise BrokenDeviceError
        return out

    @rule(fails_after=st.none() | st.integers(0, 30), **request_arguments)
    def add(
        self, prompt: int, new: int, sampling: int, strategy: str, budget: int | None, fails_after: int | None
    ) -> None:
        arguments: dict[str, Any] = dict(SAMPLING[sampling])
        processor = Failing(fails_after) if fails_after is not None else None
        if processor is not None:
            arguments["logits_processor"] = [processor]
        (request,), _ = self.lm.requests(
            PROMPTS[prompt], max_new_tokens=new, strategy=strategy, budget=budget, **arguments
        )
        if request.sampling.random is not None:
            request.sampling.random.noise.start()
        handle = self.engine.add(request)
        tokens = expected(prompt, new, sampling, self.family)
        self.live[handle] = Expectation(tokens, processor.error if processor else None)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.live[output.handle].take(output)
                if output.is_last:
                    del self.live[output.handle]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.cancel(handle)
        self.engine.cancel(handle)  # once more changes nothing
        del self.live[handle]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.engine.pause(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.engine.resume(data.draw(st.sampled_from(sorted(self.live))))

    @rule(when=st.sampled_from(["before", "after"]))
    def fail_the_next_forward(self, when: str) -> None:
        self.fault = when

    @invariant()
    def running_requests_hold_the_places(self) -> None:
        scheduler = self.engine.scheduler
        assert sorted(scheduler.running) == sorted(self.engine.cache.order)
        assert len(scheduler.running) <= 3
        known = [*scheduler.running.values(), *scheduler.waiting, *scheduler.retrying, *scheduler.paused.values()]
        ended = {output.handle for output in scheduler._ended}
        assert {state.handle for state in known} | ended == set(self.live)

    def teardown(self) -> None:
        self.fault = None
        for handle in self.live:
            self.engine.resume(handle)
        while self.engine.has_work:
            self.step(1)
        assert not self.live
        assert self.engine.scheduler.is_idle
        assert not self.engine.cache.order
        assert self.engine.step() == []


class HybridMachine(EngineMachine):
    """Recurrent state and attention: state that is put back, tokens that are fed again, states that are paused."""

    family = "qwen3_next"


@dataclass
class OpenStream:
    """A stream of several prompts, and what was read of it."""

    stream: Stream
    expected: list[list[int]]
    error: Exception | None = None
    got: list[list[int]] = field(default_factory=list)

    def read(self, chunks: int | None = None) -> bool:
        """Read some chunks, or all of them; False if there are no more."""
        while chunks is None or chunks > 0:
            try:
                chunk = next(self.stream, None)
            except ArithmeticError as raised:
                error = raised
                break
            if chunk is None:
                assert self.got == self.expected
                return False
            self.got[chunk.index] += chunk.token_ids
            assert self.got[chunk.index] == self.expected[chunk.index][: len(self.got[chunk.index])]
            chunks = chunks - 1 if chunks is not None else None
        else:
            return True
        assert error is self.error
        return False


class DriverMachine(RuleBasedStateMachine):
    """Streams of one LM that are read whenever their reader likes, while a thread decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(driver_module, "QUEUE_LIMIT", 2)
        self.lm = LM(model(), max_batch=2, prefill_chunk=16)
        self.open: list[OpenStream] = []

    @rule(
        prompts=st.lists(request_arguments["prompt"], min_size=1, max_size=3),
        fails_after=st.none() | st.integers(0, 30),
    )
    def stream(self, prompts: list[int], fails_after: int | None) -> None:
        processor = Failing(fails_after) if fails_after is not None else None
        arguments: dict[str, Any] = {"logits_processor": [processor]} if processor else {}
        strategy = STRATEGIES[sum(prompts) % len(STRATEGIES)]
        stream = self.lm.stream([PROMPTS[i] for i in prompts], max_new_tokens=14, strategy=strategy, **arguments)
        texts = [expected(i, 14, 0) for i in prompts]
        self.open.append(OpenStream(stream, texts, processor.error if processor else None, [[] for _ in prompts]))

    @rule(prompt=request_arguments["prompt"], new=request_arguments["new"], sampling=request_arguments["sampling"])
    def generate(self, prompt: int, new: int, sampling: int) -> None:
        done = self.lm.generate(PROMPTS[prompt], max_new_tokens=new, **SAMPLING[sampling])
        assert done.token_ids == expected(prompt, new, sampling)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), chunks=st.integers(1, 6))
    def read(self, data: st.DataObject, chunks: int) -> None:
        one = data.draw(st.sampled_from(self.open))
        if not one.read(chunks):
            self.open.remove(one)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.open))
        one.stream.close()
        self.open.remove(one)
        with pytest.raises(StopIteration):
            next(one.stream)

    @invariant()
    def queues_are_bounded(self) -> None:
        for one in self.open:
            source: Any = one.stream._source
            if source is not None:  # decoding begins with the first read
                assert source._queue.qsize() <= (2 + 1) * len(one.expected) + 1

    def teardown(self) -> None:
        for one in self.open:
            assert not one.read()
        wait_until(lambda: not self.lm.driver._submissions)
        assert self.lm.engine.scheduler.is_idle
        assert not self.lm.engine.cache.order
        self.lm.driver.close()
        self.patch.undo()


TestEngine = EngineMachine.TestCase
TestEngine.settings = SETTINGS
TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(SETTINGS, max_examples=20)
TestDriver = DriverMachine.TestCase
TestDriver.settings = settings(SETTINGS, max_examples=25)
