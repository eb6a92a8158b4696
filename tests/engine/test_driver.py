"""Several callers, one engine: every request gets what it would get alone, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

import lookfar
from families import tiny_model
from helpers import eager_engine, random_prompts, reference, wait_until
from lookfar import LM
from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.drafters.scripted import Scripted
from lookfar.engine import driver as driver_module
from lookfar.engine.driver import Driver
from lookfar.engine.outputs import StepOutput
from lookfar.engine.request import Request
from lookfar.errors import LookfarError, LookfarWarning
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.cost_file import KnownCosts

PROMPTS = random_prompts(12, 30, 5, 21, 9, 16)


@pytest.fixture
def lm(llama: PreTrainedModel) -> Iterator[LM]:
    lm = LM(llama)
    yield lm
    assert lm.engine.scheduler.is_idle
    assert not lm.engine.cache.order
    assert not lm.driver._submissions


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run a function in several threads at once; their results, or the errors they raised."""
    results: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return results


class Failing(LogitsProcessor):
    """Raises an error when it is called for the n-th time."""

    row_wise = True

    def __init__(self, calls: int = 1, error: BaseException | None = None) -> None:
        self.calls = calls
        self.error = error or ZeroDivisionError("of the processor")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls <= 0:
            raise self.error
        return scores


# Streams that are read late


def test_a_stream_that_is_read_late_reports_every_step_as_it_was(lm: LM) -> None:
    expected = lm.generate(PROMPTS[0], max_new_tokens=30).token_ids
    stream = lm.stream(PROMPTS[0], max_new_tokens=30, strategy="jacobi")
    chunks = [next(stream)]
    wait_until(lambda: lm.engine.scheduler.is_idle)  # everything is decoded before the rest is read
    chunks += list(stream)
    assert len(chunks) > 10
    assert [chunk.step for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    so_far = 0
    for chunk in chunks:
        so_far += len(chunk.token_ids)
        assert chunk.stats.tokens == so_far
        assert chunk.stats.steps == chunk.step
    assert [token for chunk in chunks for token in chunk.token_ids] == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 3}])
def test_a_reader_that_stops_reading_holds_no_slot_and_a_bounded_queue(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(driver_module, "QUEUE_LIMIT", 8)
    lm = LM(llama, max_batch=1, strategy="none")
    expected = [lm.generate(p, max_new_tokens=60, **options).token_ids for p in PROMPTS[:2]]
    stopped = lm.stream(PROMPTS[0], max_new_tokens=60, **options)
    got = list(next(stopped).token_ids)
    wait_until(lambda: bool(lm.engine.scheduler.paused))
    assert not lm.engine.cache.order
    source: Any = stopped._source
    assert source._queue.qsize() == 8
    # The only slot is free for others, who get what they would get alone.
    for _ in range(3):
        assert lm.generate(PROMPTS[1], max_new_tokens=60, **options).token_ids == expected[1]
    assert source._queue.qsize() == 8
    got += [token for chunk in stopped for token in chunk.token_ids]
    assert got == expected[0]
    assert lm.engine.scheduler.is_idle


def test_many_slow_readers_and_one_slot(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "QUEUE_LIMIT", 2)
    lm = LM(llama, max_batch=2)
    expected = [lm.generate(prompt, max_new_tokens=20, strategy="none").token_ids for prompt in PROMPTS]

    def read_slowly(i: int) -> list[int]:
        tokens = []
        for chunk in lm.stream(PROMPTS[i], max_new_tokens=20, strategy=["none", "jacobi", "auto"][i % 3]):
            tokens += chunk.token_ids
            time.sleep(0.002 * (i % 3))
        return tokens

    assert in_threads(6, read_slowly) == expected
    assert lm.engine.scheduler.is_idle


def test_a_stream_can_be_closed_from_another_thread(lm: LM) -> None:
    stream = lm.stream(PROMPTS[0], max_new_tokens=200, strategy="none")
    next(stream)
    slow = threading.Event()
    launch = lm.engine.runner.launch

    def slower(*arguments: Any) -> Any:
        slow.set()
        time.sleep(0.2)
        return launch(*arguments)

    lm.engine.runner.launch = slower  # type: ignore[method-assign]
    rest: list[Any] = []
    reader = threading.Thread(target=lambda: rest.extend(stream))
    reader.start()
    assert slow.wait(10)
    stream.close()  # while the reader waits for the next chunk
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    assert lm.engine.scheduler.is_idle
    assert list(stream) == []
    lm.engine.runner.launch = launch  # type: ignore[method-assign]


# Randomness


def test_threads_that_sample_without_a_seed_get_texts_of_their_own(lm: LM) -> None:
    texts = in_threads(8, lambda _: tuple(lm.generate(PROMPTS[0], max_new_tokens=12, temperature=1.5).token_ids))
    assert len(set(texts)) == 8


def test_the_same_for_accelerated_models() -> None:
    model = lookfar.accelerate(tiny_model("llama"))
    ids = torch.tensor([PROMPTS[0]])
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "pad_token_id": 0}
    texts = in_threads(8, lambda _: tuple(model.generate(ids, **arguments)[0].tolist()))
    assert len(set(texts)) == 8


def test_streams_of_one_thread_sample_texts_of_their_own(lm: LM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5}
    first, second = lm.stream(PROMPTS[0], **options), lm.stream(PROMPTS[0], **options)
    texts: list[list[int]] = [list(next(first).token_ids), list(next(second).token_ids)]
    texts[0] += [token for chunk in first for token in chunk.token_ids]
    texts[1] += [token for chunk in second for token in chunk.token_ids]
    assert texts[0] != texts[1]


def test_calls_one_after_the_other_leave_the_generator_as_generate_does(lm: LM, llama: PreTrainedModel) -> None:
    ids = torch.tensor([PROMPTS[0]])
    arguments = {"max_new_tokens": 9, "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(5)
    expected = [llama.generate(ids, **arguments)[0, 12:].tolist() for _ in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert lm.generate(PROMPTS[0], max_new_tokens=9, do_sample=True).token_ids == expected[0]
    streamed = lm.stream(PROMPTS[0], max_new_tokens=9, do_sample=True)
    assert [token for chunk in streamed for token in chunk.token_ids] == expected[1]
    assert lm.generate(PROMPTS[0], max_new_tokens=9, do_sample=True).token_ids == expected[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_an_abandoned_stream_gives_the_generator_back(lm: LM) -> None:
    torch.manual_seed(5)
    expected = lm.generate(PROMPTS[0], max_new_tokens=40, do_sample=True, strategy="none").token_ids
    torch.manual_seed(5)
    for chunk in lm.stream(PROMPTS[0], max_new_tokens=40, do_sample=True, strategy="none"):
        assert chunk.token_ids == expected[:1]
        break
    second = lm.generate(PROMPTS[0], max_new_tokens=5, do_sample=True).token_ids
    torch.manual_seed(5)
    torch.empty(1, 96).exponential_()  # the noise of the one token that was read
    assert lm.generate(PROMPTS[0], max_new_tokens=5, do_sample=True).token_ids == second


def test_the_generator_after_a_processor_raised(lm: LM, llama: PreTrainedModel) -> None:
    ids, arguments = torch.tensor([PROMPTS[0]]), {"max_new_tokens": 9, "do_sample": True}
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError):
        llama.generate(ids, logits_processor=[Failing(4)], pad_token_id=0, **arguments)
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError):
        lm.generate(PROMPTS[0], logits_processor=[Failing(4)], **arguments)
    assert torch.equal(torch.get_rng_state(), expected)


# Errors


def test_a_processor_that_raises_fails_its_own_request_only(lm: LM) -> None:
    expected = reference(lm.model, PROMPTS[1], 15)

    def work(i: int) -> list[Any]:
        results = []
        for n in range(10):
            try:
                if i % 2:
                    results.append(lm.generate(PROMPTS[1], max_new_tokens=15).token_ids)
                else:
                    failing = Failing(1 + n % 5, KeyError(str(n)))
                    results.append(lm.generate(PROMPTS[0], max_new_tokens=15, logits_processor=[failing]))
            except BaseException as error:
                results.append(error)
        return results

    for i, results in enumerate(in_threads(4, work)):
        if i % 2:
            assert results == [expected] * 10
        else:
            assert [type(result) for result in results] == [KeyError] * 10
            assert [result.args for result in results] == [(str(n),) for n in range(10)]


def test_a_stopping_criterion_that_raises_fails_its_own_request_only(lm: LM) -> None:
    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        raise LookupError("of the criterion")

    stream = lm.stream(PROMPTS[1], max_new_tokens=40)
    got = list(next(stream).token_ids)
    with pytest.raises(LookupError, match="of the criterion"):
        lm.generate(PROMPTS[0], stopping_criteria=[criterion])
    got += [token for chunk in stream for token in chunk.token_ids]
    assert got == reference(lm.model, PROMPTS[1], 40)


@dataclass(frozen=True)
class BrokenStrategy(Strategy):
    """Raises an error in one of its methods."""

    name: ClassVar[str] = "broken"
    where: str = "propose"
    max_rows = 4  # type: ignore[assignment]

    def create(self, context: DraftContext) -> list[Drafter]:
        if self.where == "create":
            raise ArithmeticError("in create")
        return [BrokenDrafter(self.where)]


class BrokenDrafter:
    name = "broken"
    wants_predictions = False

    def __init__(self, where: str) -> None:
        self.where = where

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        if self.where == "propose" and len(ids) > 14:
            raise ArithmeticError("in propose")
        if self.where == "arrays":
            return Proposal(drafts=[[1, 2]])  # type: ignore[arg-type]
        return Proposal.of([[1, 2]])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if self.where == "observe" and len(ids) > 14:
            raise ArithmeticError("in observe")


@pytest.mark.parametrize("where", ["create", "propose", "observe", "arrays"])
def test_a_drafter_that_raises_fails_its_own_request_only(lm: LM, where: str) -> None:
    expected = reference(lm.model, PROMPTS[1], 20)

    def work(i: int) -> Any:
        strategy = BrokenStrategy(where) if i % 2 else "auto"
        return lm.generate(PROMPTS[i % 2 ^ 1], max_new_tokens=20, strategy=strategy, budget=6).token_ids

    for i, result in enumerate(in_threads(6, work)):
        if i % 2 == 0:
            assert result == expected
        else:
            assert isinstance(result, ArithmeticError if where != "arrays" else AttributeError)


def test_a_failed_forward_is_retried_for_each_request_alone(lm: LM) -> None:
    """Two requests of a batch run out of memory together; alone they fit."""
    expected = [reference(lm.model, prompt, 20) for prompt in PROMPTS[:3]]
    launch = lm.engine.runner.launch

    def together_fails(plan: Any, cache: Any) -> Any:
        out = launch(plan, cache)
        if plan.batch > 1 and int(plan.num_cached.max()) > 25:
            raise MemoryError("too many at once")
        return out

    lm.engine.runner.launch = together_fails  # type: ignore[method-assign]
    for options in ({}, {"strategy": "none"}, {"strategy": "lookahead"}):
        done = lm.generate(PROMPTS[:3], max_new_tokens=20, **options)
        assert [one.token_ids for one in done] == expected
    stream = lm.stream(PROMPTS[:3], max_new_tokens=20)
    texts: list[list[int]] = [[], [], []]
    for chunk in stream:
        texts[chunk.index] += chunk.token_ids
    assert texts == expected
    lm.engine.runner.launch = launch  # type: ignore[method-assign]


def test_a_forward_that_fails_for_one_request_is_reported_to_that_one(lm: LM) -> None:
    expected = [reference(lm.model, prompt, 15) for prompt in PROMPTS[1:4]]
    poison = next(token for token in range(3, 96) if not any(token in text for text in [*expected, *PROMPTS]))
    launch = lm.engine.runner.launch

    def poisoned(plan: Any, cache: Any) -> Any:
        if any(poison in rows.tokens.tolist() for rows in plan.requests):
            raise RuntimeError("device-side assert")
        return launch(plan, cache)

    lm.engine.runner.launch = poisoned  # type: ignore[method-assign]
    prompts = [[*PROMPTS[0], poison], *PROMPTS[1:4]]

    def work(i: int) -> list[int]:
        return lm.generate(prompts[i], max_new_tokens=15, strategy="none").token_ids

    bad, *good = in_threads(4, work)
    assert isinstance(bad, RuntimeError)
    assert str(bad) == "device-side assert"
    assert good == expected
    lm.engine.runner.launch = launch  # type: ignore[method-assign]


def test_a_forward_that_always_fails_is_reported_to_every_request(lm: LM) -> None:
    launch = lm.engine.runner.launch
    lm.engine.runner.launch = lambda *_: _raise(RuntimeError("no device"))  # type: ignore[method-assign]
    for error in in_threads(5, lambda i: lm.generate(PROMPTS[i], max_new_tokens=5)):
        assert isinstance(error, RuntimeError)
        assert str(error) == "no device"
    lm.engine.runner.launch = launch  # type: ignore[method-assign]
    assert lm.generate(PROMPTS[0], max_new_tokens=5).token_ids == reference(lm.model, PROMPTS[0], 5)


def _raise(error: BaseException) -> Any:
    raise error


def test_a_fault_of_the_engine_is_reported_to_every_request_and_ends_none_of_the_next(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lm.engine.scheduler, "schedule", lambda _: _raise(AssertionError("a bug")))
        for error in in_threads(3, lambda i: lm.generate(PROMPTS[i], max_new_tokens=5)):
            assert isinstance(error, AssertionError)
    assert lm.generate(PROMPTS[0], max_new_tokens=5).token_ids == reference(lm.model, PROMPTS[0], 5)


# Readers


@pytest.mark.parametrize("captured", [False, True])
def test_readers_are_notified_while_the_next_step_runs(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """On a device of its own; elsewhere a step would keep them waiting."""
    lm = LM(llama, strategy="none")
    runner, launch, plan = lm.engine.runner, lm.engine.runner.launch, lm.engine.speculator.plan
    events: list[str] = []
    monkeypatch.setattr(type(runner), "limits", replace(runner.limits, captured=captured))

    def watched(*arguments: Any) -> Any:
        events.append("plan")
        return plan(*arguments)

    def launched(*arguments: Any) -> Any:
        pending = launch(*arguments)
        events.append("launched")
        return pending

    monkeypatch.setattr(lm.engine.speculator, "plan", watched)
    monkeypatch.setattr(runner, "launch", launched)
    done = threading.Event()

    def notify(is_last: bool) -> None:
        events.append("last" if is_last else "output")
        if is_last:
            done.set()

    submission = lm.driver.submit({0: Request(PROMPTS[0], 4)}, stream=True, notify=notify)
    assert done.wait(20)
    assert len(submission.take()) == 4
    step = ["plan", "launched", "output"]
    assert events == [*step[:2], *3 * step, "last"] if captured else [*3 * step, *step[:2], "last"]


# Order, cancelling and nesting


def test_requests_are_admitted_in_the_order_of_their_submission(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LM(llama, max_batch=1, strategy="none")
    step = lm.engine.step
    finished: list[int] = []

    def watched(*arguments: Any) -> list[StepOutput]:
        outputs = step(*arguments)
        finished.extend(output.handle for output in outputs if output.finish_reason is not None)
        return outputs

    monkeypatch.setattr(lm.engine, "step", watched)
    submissions = [lm.driver.submit({0: Request(PROMPTS[i % 6], 4)}) for i in range(12)]
    in_threads(12, lambda i: submissions[i].results())
    assert len(finished) == 12
    assert finished == sorted(finished)


def test_submitting_does_not_wait_for_the_measuring_of_costs(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client hands in its request at once, however long the engine is busy."""
    lm = LM(llama)
    measuring, go_on = threading.Event(), threading.Event()

    def slow_costs(*_: Any) -> KnownCosts:
        measuring.set()
        assert go_on.wait(10)
        return KnownCosts(CostCurve({1: 1.0, 64: 1.0}))

    monkeypatch.setattr("lookfar.engine.engine.known_costs", slow_costs)
    first = lm.driver.submit({0: lm.requests(PROMPTS[0], max_new_tokens=4)[0][0]})
    assert measuring.wait(10)
    began = time.monotonic()
    second = lm.driver.submit({0: Request(PROMPTS[1], 4)})
    assert time.monotonic() - began < 0.5
    go_on.set()
    assert first.results()[0].token_ids == reference(llama, PROMPTS[0], 4)
    assert second.results()[0].token_ids == reference(llama, PROMPTS[1], 4)


def test_a_request_is_cancelled_before_it_starts(llama: PreTrainedModel) -> None:
    lm = LM(llama, max_batch=1)
    first = lm.stream(PROMPTS[0], max_new_tokens=100, strategy="none")
    next(first)
    waiting = lm.driver.submit({0: Request(PROMPTS[1], 50), 1: Request(PROMPTS[2], 50)}, stream=True)
    wait_until(lambda: len(waiting.handles) == 2)
    waiting.cancel()
    assert waiting.next_output() is None
    assert not lm.engine.scheduler.waiting
    first.close()
    assert lm.engine.scheduler.is_idle


def test_cancelling_one_stream_disturbs_no_other(lm: LM) -> None:
    expected = [reference(lm.model, prompt, 30) for prompt in PROMPTS]

    def work(i: int) -> list[int]:
        tokens: list[int] = []
        for chunk in lm.stream(PROMPTS[i], max_new_tokens=30, strategy="jacobi"):
            tokens += chunk.token_ids
            if i % 2 and len(tokens) > 3 * i:
                break
        return tokens

    for i, tokens in enumerate(in_threads(6, work)):
        assert tokens == expected[i][: len(tokens)]
        assert i % 2 or len(tokens) == 30


def test_a_processor_that_calls_the_same_lm_does_not_hang(lm: LM) -> None:
    nested: list[list[int]] = []

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not nested:
                nested.append(lm.generate(PROMPTS[1], max_new_tokens=6).token_ids)
                nested.append([t for c in lm.stream(PROMPTS[2], max_new_tokens=4) for t in c.token_ids])
            return scores

    with pytest.warns(LookfarWarning, match="from inside a request of the same LM"):
        done = lm.generate(PROMPTS[0], max_new_tokens=8, logits_processor=[Nested()])
    assert done.token_ids == reference(lm.model, PROMPTS[0], 8)
    assert nested == [reference(lm.model, PROMPTS[1], 6), reference(lm.model, PROMPTS[2], 4)]


def test_the_same_for_accelerated_models_that_nest() -> None:
    model = lookfar.accelerate(tiny_model("llama"))
    ids = torch.tensor([PROMPTS[0]])
    nested: list[torch.Tensor] = []

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not nested:
                nested.append(model.generate(ids, max_new_tokens=5, pad_token_id=0))
            return scores

    with pytest.warns(LookfarWarning, match="from inside a request of the same LM"):
        out = model.generate(ids, max_new_tokens=8, pad_token_id=0, logits_processor=[Nested()])
    lookfar.restore(model)
    assert torch.equal(out, model.generate(ids, max_new_tokens=8, pad_token_id=0))
    assert torch.equal(nested[0], model.generate(ids, max_new_tokens=5, pad_token_id=0))


def test_a_callback_may_use_the_same_lm(lm: LM) -> None:
    nested: list[list[int]] = []

    def on_step(_: Any) -> None:
        if len(nested) < 2:
            nested.append(lm.generate(PROMPTS[1], max_new_tokens=4).token_ids)

    assert lm.generate(PROMPTS[0], max_new_tokens=9, on_step=on_step).token_ids == reference(lm.model, PROMPTS[0], 9)
    assert nested == [reference(lm.model, PROMPTS[1], 4)] * 2


# The thread


def test_a_step_without_work_does_nothing(llama: PreTrainedModel) -> None:
    engine = eager_engine(llama)
    assert engine.step() == []
    assert not engine.has_work
    handle = engine.add(Request(PROMPTS[0], 3))
    assert engine.has_work
    engine.cancel(handle)
    assert engine.step() == []
    engine.cancel(handle)  # again: nothing happens


@pytest.mark.slow
def test_the_thread_ends_with_its_driver(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    lm.generate(PROMPTS[0], max_new_tokens=3)
    thread, engine = lm.driver._thread, weakref.ref(lm.engine)
    assert thread is not None
    assert thread.is_alive()
    del lm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None  # and its memory is free


def test_a_closed_driver_reports_what_it_did_not_finish(llama: PreTrainedModel) -> None:
    driver = Driver(eager_engine(llama))
    submission = driver.submit({0: Request(PROMPTS[0], 200)}, stream=True)
    assert submission.next_output() is not None
    driver.close()
    with pytest.raises(LookfarError, match="The engine was closed"):
        list(submission)
    again = driver.submit({0: Request(PROMPTS[0], 3)})  # a new request starts it again
    assert again.results()[0].token_ids == reference(llama, PROMPTS[0], 3)


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_a_stream() -> None:
    script = """
import torch
from lookfar import LM
from lookfar.testing import tiny_model
stream = LM(tiny_model()).stream([5, 6, 7], max_new_tokens=250, strategy="none")
print(next(stream).token_ids)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_decodes_with_a_thread_of_its_own() -> None:
    script = """
import os, torch
torch.set_num_threads(1)
from lookfar import LM
from lookfar.testing import tiny_model
lm = LM(tiny_model())
stream = lm.stream([5, 6, 7], max_new_tokens=60, strategy="none")
expected = lm.generate([8, 9], max_new_tokens=9).token_ids
next(stream)
child = os.fork()
if child == 0:
    assert lm.generate([8, 9], max_new_tokens=9).token_ids == expected
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0
assert sum(len(chunk.token_ids) for chunk in stream) == 59
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bloom", "gpt2"])
def test_the_model_can_be_used_while_it_decodes(family: str) -> None:
    """Hooks and packed weights of a step do not reach forward passes of other threads."""
    model = tiny_model(family, torch.float32)
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        expected = model(ids).logits
    lm = LM(model)
    right = Scripted(lambda ids: [[7, 8], [9]])
    stop = threading.Event()

    def decode(_: int) -> None:
        while not stop.is_set():
            lm.generate(PROMPTS[0], max_new_tokens=30, strategy=right)

    decoding = threading.Thread(target=decode, args=(0,))
    decoding.start()
    try:
        for _ in range(150):
            with torch.no_grad():
                assert torch.equal(model(ids).logits, expected)
    finally:
        stop.set()
        decoding.join(30)


def test_autocast_is_left_to_transformers(lm: LM) -> None:
    model = tiny_model("llama", torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    lm, fast = LM(model), lookfar.accelerate(tiny_model("llama", torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(ids, max_new_tokens=9, pad_token_id=0)
        with pytest.warns(LookfarWarning, match="autocast is on"):
            assert lm.generate(PROMPTS[0], max_new_tokens=9).token_ids == expected[0, 12:].tolist()
        with pytest.warns(LookfarWarning, match="autocast is on"):
            assert torch.equal(fast.generate(ids, max_new_tokens=9, pad_token_id=0), expected)
