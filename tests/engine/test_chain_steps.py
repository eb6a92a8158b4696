"""Steps of requests with recurrent state: rows of equal number, and requests that become even again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from families import tiny_model
from helpers import eager_engine, random_prompts, reference
from lookfar.drafters.scripted import Scripted
from lookfar.engine.engine import Engine
from lookfar.engine.request import Request
from lookfar.speculation.speculator import Speculator, StepRecord

PROMPTS = random_prompts(7, 12, 9)
NEW = 24


def wrong_after(texts: list[list[int]], right: Seq[int]) -> Scripted:
    """Drafts of four tokens, of which `right[i]` are right for text i."""

    def script(ids: Seq[int]) -> list[list[int]]:
        place = next(i for i, text in enumerate(texts) if text[: len(ids)] == list(ids))
        rest = texts[place][len(ids) : len(ids) + 4]
        return [rest[: right[place]] + [(token + 1) % 90 for token in rest[right[place] :]]] if rest else []

    return Scripted(script)


def started() -> tuple[Engine, list[list[int]]]:
    """An engine with three requests of a hybrid model, and the answers of `generate`."""
    model = tiny_model("lfm2")
    answers = [reference(model, prompt, NEW) for prompt in PROMPTS]
    drafts = wrong_after([prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)], (4, 0, 2))
    engine = eager_engine(model, prefill_chunk=64)
    for index, prompt in enumerate(PROMPTS):
        engine.add(Request(prompt, NEW, strategies=(drafts,)), index)
    return engine, answers


def test_a_step_has_the_same_rows_for_all_and_keeps_those_whose_drafts_were_right() -> None:
    engine, _ = started()
    while any(state.prompt_pending for state in engine.scheduler.running.values()) or not engine.scheduler.running:
        engine.step()
    fed = [output.fed for output in engine.step()]
    assert [len(rows) for rows in fed if rows is not None] == [5, 5, 5]
    pending = [state.num_pending for state in engine.scheduler.running.values()]
    assert pending == [1, 2, 4]  # all right; the last token again; that and two drafts again


def test_requests_become_even_when_speculation_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answers = started()
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    decide = Speculator._decide

    def step() -> Any:
        found = engine.step()
        for output in found:
            assert output.error is None
            outputs[output.index] += output.tokens
        return found

    for _ in range(5):
        step()

    def off(self: Speculator, batch: Any) -> StepRecord:
        record = decide(self, batch)
        record.speculates = False
        return record

    monkeypatch.setattr(Speculator, "_decide", off)
    states = list(engine.scheduler.running.values())
    assert len({state.num_pending for state in states}) > 1
    for _ in range(len(states)):
        step()
    assert {state.num_pending for state in states if not state.is_finished} == {1}
    while engine.has_work:
        widths = {len(output.fed) for output in step() if output.fed is not None}
        assert widths <= {1}
    assert list(outputs.values()) == answers
