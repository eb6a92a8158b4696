"""Hostile callers: collected, forked, nested, closed or failing at the worst moment. Nothing hangs or is mixed up."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

from families import tiny_model
from helpers import random_prompts, reference, wait_until
from lookfar import LM, LookfarError
from lookfar.drafters.scripted import Scripted
from lookfar.engine import driver as driver_module

PROMPTS = random_prompts(12, 30, 5, 21)


def ends(work: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Run a function in a thread; its result or error. Fails if it does not end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


def test_an_lm_is_collected_together_with_its_stream(llama: PreTrainedModel) -> None:
    class Chat:
        def __init__(self) -> None:
            self.lm = LM(llama, strategy="none")
            self.stream = self.lm.stream(PROMPTS[0], max_new_tokens=20)
            self.on_stop = self.stop  # a cycle
            next(self.stream)
            wait_until(lambda: self.lm.engine.scheduler.is_idle)

        def stop(self) -> None: ...

    def use_and_drop() -> str:
        Chat()
        gc.collect()
        return "collected"

    assert ends(use_and_drop) == "collected"


def test_two_readers_of_one_stream_both_end(llama: PreTrainedModel) -> None:
    lm = LM(llama, strategy="none")
    stream = lm.stream(PROMPTS[0], max_new_tokens=30)
    parts: list[list[int]] = [[], []]

    def read(i: int) -> None:
        for chunk in stream:
            parts[i] += chunk.token_ids

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(parts[0] + parts[1]) == sorted(reference(llama, PROMPTS[0], 30))


def test_a_request_cannot_wait_for_another_one_of_its_lm(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    side = lm.stream(PROMPTS[1], max_new_tokens=4)

    class Reader(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            next(side, None)
            return scores

    error = ends(lambda: lm.generate(PROMPTS[0], max_new_tokens=3, logits_processor=[Reader()]))
    assert isinstance(error, LookfarError)
    assert "read the stream outside of it" in str(error)
    assert ends(lambda: lm.generate(PROMPTS[2], max_new_tokens=3)).token_ids == reference(llama, PROMPTS[2], 3)


def test_a_request_that_cannot_be_paused_goes_on(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "QUEUE_LIMIT", 8)
    lm = LM(llama, strategy="none")

    def no_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(lm.engine.cache, "export_kv", no_memory)
    slow = lm.stream(PROMPTS[0], max_new_tokens=60)
    first = next(slow).token_ids
    assert ends(lambda: lm.generate(PROMPTS[1], max_new_tokens=90)).token_ids == reference(llama, PROMPTS[1], 90)
    rest = ends(lambda: [token for chunk in slow for token in chunk.token_ids])
    assert first + rest == reference(llama, PROMPTS[0], 60)


def test_an_error_in_a_message_reaches_all_callers_and_the_driver_goes_on(llama: PreTrainedModel) -> None:
    lm = LM(llama, strategy="none")
    stream = lm.stream(PROMPTS[0], max_new_tokens=200)
    next(stream)

    def fail() -> None:
        raise ZeroDivisionError

    lm.driver.post(fail)
    assert isinstance(ends(lambda: list(stream)), ZeroDivisionError)
    assert ends(lambda: lm.generate(PROMPTS[1], max_new_tokens=5)).token_ids == reference(llama, PROMPTS[1], 5)


def test_each_caller_gets_an_error_of_its_own(llama: PreTrainedModel) -> None:
    lm = LM(llama, strategy="none")
    hold = threading.Event()
    lm.driver.post(hold.wait)  # type: ignore[arg-type]
    found: dict[str, BaseException] = {}

    def alice() -> None:
        lm.generate(PROMPTS[0], max_new_tokens=3)

    def bob() -> None:
        lm.generate(PROMPTS[1], max_new_tokens=3)

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except AssertionError as error:
            found[call.__name__] = error

    def fault(_: Any) -> Any:
        raise AssertionError("a fault")

    lm.engine.scheduler.schedule = fault  # type: ignore[method-assign]
    threads = [threading.Thread(target=run, args=(call,)) for call in (alice, bob)]
    for thread in threads:
        thread.start()
    wait_until(lambda: lm.driver._inbox.qsize() == 2)
    hold.set()
    for thread in threads:
        thread.join(20)
    assert found["alice"] is not found["bob"]
    frames = {name: [f.name for f in traceback.extract_tb(error.__traceback__)] for name, error in found.items()}
    assert "bob" not in frames["alice"]
    assert "alice" not in frames["bob"]


def test_a_call_during_close_is_decoded_by_one_thread(llama: PreTrainedModel) -> None:
    lm = LM(llama, strategy="none")
    inside: set[int] = set()
    most = 0
    step = lm.engine.step
    begun = threading.Event()

    def watched(*arguments: Any) -> Any:
        nonlocal most
        inside.add(threading.get_ident())
        most = max(most, len(inside))
        begun.set()
        try:
            threading.Event().wait(0.02)
            return step(*arguments)
        finally:
            inside.discard(threading.get_ident())

    lm.engine.step = watched  # type: ignore[method-assign]
    stream = lm.stream(PROMPTS[0], max_new_tokens=100)
    next(stream)
    closing = threading.Thread(target=lm.driver.close)
    closing.start()
    assert ends(lambda: lm.generate(PROMPTS[1], max_new_tokens=6)).token_ids == reference(llama, PROMPTS[1], 6)
    closing.join(20)
    assert not closing.is_alive()
    assert most == 1
    assert isinstance(ends(lambda: list(stream)), LookfarError)


def test_any_error_of_a_drafter_ends_its_own_request_only(llama: PreTrainedModel) -> None:
    lm = LM(llama)

    def cancelled(_: Any) -> list[list[int]]:
        raise asyncio.CancelledError

    other = lm.stream(PROMPTS[1], max_new_tokens=20)
    tokens = next(other).token_ids
    assert isinstance(
        ends(lambda: lm.generate(PROMPTS[0], max_new_tokens=5, strategy=Scripted(cancelled))), asyncio.CancelledError
    )
    assert tokens + [t for chunk in other for t in chunk.token_ids] == reference(llama, PROMPTS[1], 20)


def test_tokens_of_a_step_that_failed_late_have_sources(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    expected = [reference(llama, prompt, 30) for prompt in PROMPTS[:2]]
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=False)]
    right = Scripted(lambda ids: [text[len(ids) :][:4] for text in texts if text[: len(ids)] == list(ids)])
    commit, calls = lm.engine.cache.commit, 0

    def fail_once(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise RuntimeError
        return commit(*arguments)

    lm.engine.cache.commit = fail_once  # type: ignore[method-assign]
    seen: list[list[int]] = [[], []]
    for chunk in lm.stream(PROMPTS[:2], max_new_tokens=30, strategy=right):
        seen[chunk.index] += chunk.token_ids
        assert len(chunk.sources) == len(chunk.token_ids)
        assert chunk.stats.seconds > 0
    assert calls > 8
    assert seen == expected


def test_a_stream_without_a_chunk_returns_its_generator(llama: PreTrainedModel) -> None:
    class Failing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    ids = torch.tensor([PROMPTS[0]], device=llama.device)
    torch.manual_seed(5)
    expected = llama.generate(ids, max_new_tokens=9, do_sample=True, pad_token_id=0)[0, 12:].tolist()
    lm = LM(llama)
    stream = lm.stream(PROMPTS[0], do_sample=True, logits_processor=[Failing()])
    with pytest.raises(ZeroDivisionError):
        next(stream)
    torch.manual_seed(5)
    assert lm.generate(PROMPTS[0], max_new_tokens=9, do_sample=True).token_ids == expected


def test_closing_a_stream_keeps_a_seed_that_was_set_meanwhile(llama: PreTrainedModel) -> None:
    stream = LM(llama).stream(PROMPTS[0], max_new_tokens=20, do_sample=True)
    next(stream)
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected[0])
    stream.close()
    assert torch.equal(torch.rand(3), expected[1])


@pytest.mark.slow
def test_two_lms_of_one_model_in_two_threads() -> None:
    model = tiny_model("llama", torch.float32)
    expected = [reference(model, prompt, 20) for prompt in PROMPTS]
    results: list[list[list[int]]] = [[], []]

    def work(i: int) -> None:
        lm = LM(model, pack=True)
        for _ in range(3):
            results[i] += [lm.generate(prompt, max_new_tokens=20).token_ids for prompt in PROMPTS]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [expected * 3] * 2


def test_a_copy_of_the_model_that_is_made_while_it_decodes_is_independent() -> None:
    model = tiny_model("llama", torch.float32)
    lm = LM(model, pack=True)
    copies: list[PreTrainedModel] = []

    def make_copy(*_: Any) -> None:
        copies.append(copy.deepcopy(model))

    make_copy.row_wise = True  # type: ignore[attr-defined]
    hook = model.lm_head.register_forward_hook(make_copy)
    lm.generate(PROMPTS[0], max_new_tokens=2)
    hook.remove()
    ids = torch.tensor([PROMPTS[0]])
    assert copies
    with torch.no_grad():
        assert torch.equal(copies[0](ids).logits, model(ids).logits)
        for layer in copies[0].modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.zero_()
        assert not copies[0](ids).logits.any()
        assert model(ids).logits.any()


@pytest.mark.filterwarnings("ignore:llama decodes without speculation")
def test_a_stream_under_autocast_follows_it() -> None:
    model = tiny_model("llama", torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(ids, max_new_tokens=40, pad_token_id=0, do_sample=False)[0, 12:].tolist()
        streamed = [token for chunk in LM(model).stream(PROMPTS[0], max_new_tokens=40) for token in chunk.token_ids]
    assert streamed == expected
    assert expected != reference(model, PROMPTS[0], 40)  # otherwise this shows nothing


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def in_a_fork(work: Callable[[], bool]) -> int:
    """Run a function in a forked process: 0 if it returned True; negative if it did not end."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_cannot_read_the_streams_of_its_parent(llama: PreTrainedModel) -> None:
    stream = LM(llama, strategy="none").stream(PROMPTS[0], max_new_tokens=60)
    next(stream)

    def read() -> bool:
        try:
            list(stream)
        except LookfarError as error:
            return "parent process" in str(error)
        return False

    assert in_a_fork(read) == 0
    stream.close()


@pytest.mark.slow
@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_waits_for_a_store_that_learns(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    lm.generate(PROMPTS[0], max_new_tokens=5)
    stop, text = threading.Event(), random_prompts(20_000)[0]

    def learn() -> None:
        while not stop.is_set():
            lm.store.learn([text])

    thread = threading.Thread(target=learn)
    thread.start()
    try:
        expected = reference(llama, PROMPTS[1], 3)
        for _ in range(4):
            assert in_a_fork(lambda: lm.generate(PROMPTS[1], max_new_tokens=3).token_ids == expected) == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_a_fallback_stream() -> None:
    script = (
        "import torch, warnings; warnings.simplefilter('ignore'); from families import tiny_model; import lookfar; "
        "stream = lookfar.LM(tiny_model('mamba', torch.float32)).stream([5, 6, 7], max_new_tokens=100000); "
        "next(stream); print('end')"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == "end"
