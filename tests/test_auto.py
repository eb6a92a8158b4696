"""Every source alone, all together, any budget, alone and in batches: the tokens of `generate`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

import lookfar
from conftest import random_prompts, reference
from families import tiny_model
from lookfar.answers import EagerSteps, Room
from lookfar.budget import CostCurve
from lookfar.config import AUTO_ROWS, STRATEGIES, Strategy
from lookfar.drafters.base import Drafter, Outcome, Proposal
from lookfar.drafters.scripted import Scripted
from lookfar.engine import Engine
from lookfar.memory import Memory
from lookfar.model import BoundModel
from lookfar.pace import Pace
from lookfar.planner import plan_step
from lookfar.sequence import OnStep, Request, Sequence
from lookfar.tree import SequencePlan

PROMPTS = random_prompts(20, 33, 5, 1)
# A text with repetitions, so that there is something to copy.
PROMPTS.append(PROMPTS[0] + PROMPTS[0][:9] + PROMPTS[0] + PROMPTS[0][:4])
NEW = 24
FLAT = CostCurve({1: 1.0, 128: 1.0})


@cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family)


@cache
def expected_of(family: str) -> list[list[int]]:
    return [reference(model_of(family), prompt, NEW) for prompt in PROMPTS]


def every_strategy(family: str) -> list[Strategy]:
    made: list[Strategy] = [cls() for name, cls in STRATEGIES.items() if name != "draft_model"]
    return [*made, lookfar.DraftModel(model=model_of(family), length=3)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize("budget", [None, 2, 9, 40])
def test_every_source_alone_and_all_of_them(family: str, budget: int | None) -> None:
    lm = lookfar.LM(model_of(family), prefill_rows=16, max_batch=3)
    accepted = 0
    for strategy in [*every_strategy(family), "auto", "auto+trie+lookahead"]:
        lm.forget()
        single = [lm.generate(p, max_new_tokens=NEW, strategy=strategy, budget=budget) for p in PROMPTS]
        batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=strategy, budget=budget)
        assert [done.token_ids for done in single] == expected_of(family), strategy
        assert [done.token_ids for done in batch] == expected_of(family), strategy
        if budget is not None:
            assert all(done.stats.rows <= budget * done.stats.steps for done in single), strategy
        accepted += sum(d.accepted for done in batch for d in done.stats.drafters.values())
    assert accepted > 100  # so this compared trees, and not plain decoding with itself


sources = st.lists(st.sampled_from(sorted(set(STRATEGIES) - {"draft_model"})), min_size=1, max_size=4, unique=True)
budgets = st.one_of(st.none(), st.just("auto"), st.integers(1, 70))


@given(sources, budgets, st.integers(1, 4), st.sampled_from([1, 7, 512]), st.sampled_from(["llama", "qwen2"]))
@settings(max_examples=30)
def test_any_mixture_and_budget(
    names: list[str], budget: int | str | None, slots: int, prefill_rows: int, family: str
) -> None:
    engine = Engine(BoundModel(model_of(family)), slots, prefill_rows=prefill_rows, costs=FLAT)
    strategies = tuple(STRATEGIES[name]() for name in names)
    todo = [Request(prompt, 12, strategies=strategies, budget=budget) for prompt in PROMPTS]  # type: ignore[arg-type]
    for _ in range(2):  # the second time from a full memory
        assert [s.output for s in engine.run(todo)] == [tokens[:12] for tokens in expected_of(family)]


def rows_of(engine: Engine, requests: list[Request]) -> list[SequencePlan]:
    seen: list[SequencePlan] = []
    keep: OnStep = lambda sequence, rows, tokens, seconds: seen.append(rows)  # noqa: E731
    engine.run(requests, on_step=keep)
    return seen


def automatic(prompt: list[int], new: int = NEW) -> Request:
    return Request(prompt, new, strategies=lookfar.config.parse_strategy("auto"), budget="auto")


def test_where_rows_are_dear_it_is_plain_decoding() -> None:
    dear = CostCurve({1: 1.0, 2: 10.0, 128: 1000.0})
    engine = Engine(BoundModel(model_of("llama")), costs=dear)
    dear.refine = lambda *_: None  # type: ignore[method-assign]
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert all(len(rows.tree) == 0 for rows in seen if len(rows.chain) == 1)  # a prompt's rows cost as it is
    assert len(seen) > 10


def test_the_time_of_the_host_is_paid_once_however_many_rows() -> None:
    dear = CostCurve({1: 1.0, 2: 10.0, 128: 1000.0})
    engine = Engine(BoundModel(model_of("llama")), costs=dear)
    dear.refine = lambda *_: None  # type: ignore[method-assign]
    pace = engine._paces[1] = Pace()
    pace.learn = lambda *_: None  # type: ignore[method-assign]
    pace.overhead = 1e6
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert max(len(rows.tree) for rows in seen) > 16


@pytest.mark.parametrize("prefill_rows", [512, 3, 1])
def test_prompts_are_learned_while_guessing_rests(prefill_rows: int) -> None:
    """It may be asked for again, by this text or another."""
    engine = Engine(BoundModel(model_of("llama")), prefill_rows=prefill_rows, costs=CostCurve({1: 1.0, 128: 1.0}))
    pace = engine._paces[1] = Pace()
    pace.guessing, pace._wait = False, 1 << 30
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert all(len(rows.tree) == 0 for rows in seen)
    learned = engine.memory.successors.tables.token_ids[:, 0] >= 0
    # What is read by a step of its own looks as if it was decoded.
    assert set(np.flatnonzero(learned)) >= set(PROMPTS[4][:-1])


def test_steps_that_read_prompts_say_nothing_about_guessing() -> None:
    engine = Engine(BoundModel(model_of("llama")), prefill_rows=8, costs=CostCurve({1: 1.0, 128: 1.0}))
    pace, told = Pace(), []
    engine._paces[1] = pace
    pace.learn = lambda *arguments: told.append(arguments)  # type: ignore[method-assign]
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert len(PROMPTS[4]) > 8
    assert len(told) == len(seen) - 1  # the first of these also read the end of the prompt


def test_a_strategy_chosen_by_hand_is_fed_beside_an_automatic_one() -> None:
    engine = Engine(BoundModel(model_of("llama")), costs=CostCurve({1: 1.0, 2: 10.0, 128: 1000.0}))
    told = Scripted(lambda ids: [[7, 8, 9]])
    seen: list[int] = []

    def keep(sequence, rows, tokens, seconds) -> None:  # type: ignore[no-untyped-def]
        if sequence.index == 0 and len(engine.active) == 2 and sequence.remaining > 3:
            seen.append(len(rows.tree))

    engine.run([Request(PROMPTS[0], NEW, strategies=(told,)), automatic(PROMPTS[1])], on_step=keep)
    assert len(seen) > 5
    assert all(seen)  # however dear rows are


def test_a_sequence_that_reads_is_no_token_that_guesses_would_delay() -> None:
    """One guess for one sequence, and a tenth more time: that pays if nobody else waits for a token."""
    told, memory = Scripted(lambda ids: [[7]]), Memory(96)
    costs = CostCurve({1: 1.0, 9: 1.0, 10: 1.1, 128: 100.0})
    sequences = [
        Sequence(Request(p, NEW, strategies=(told,), budget="auto"), i, memory) for i, p in enumerate(PROMPTS[:2])
    ]
    sequences[0].cached = len(PROMPTS[0]) - 1

    def guesses(*pieces: int) -> int:
        plan = plan_step(sequences, 0, pieces, memory, costs, Room(512, packed=True))
        return sum(len(rows.tree) for rows in plan.sequences)

    assert len(PROMPTS[1]) > 9
    assert guesses(1, 8) == 1
    sequences[1].cached = len(PROMPTS[1]) - 8  # the same rows, but the second one comes to its end
    assert guesses(1, 8) == 0


def test_where_rows_are_free_it_takes_them() -> None:
    engine = Engine(BoundModel(model_of("llama")), costs=CostCurve({1: 1.0, 128: 1.0}))
    engine.costs.refine = lambda *_: None  # type: ignore[method-assign, union-attr]
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert max(len(rows.tree) for rows in seen) > 16
    assert all(len(rows) - rows.root_row <= AUTO_ROWS for rows in seen)


def test_confident_sequences_of_a_batch_take_more_rows() -> None:
    # One repeats itself, the other is new: with one heap for both, the first gets the most rows.
    lm = lookfar.LM(model_of("llama"), max_batch=2)
    sure = lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
    assert sure
    widths: dict[int, list[int]] = {0: [], 1: []}

    def keep(sequence, rows, tokens, seconds) -> None:  # type: ignore[no-untyped-def]
        widths[sequence.index].append(len(rows.tree))

    fresh = [90 - token for token in PROMPTS[1]]
    lm.generate([PROMPTS[0], fresh], max_new_tokens=NEW, strategy="suffix", budget=6, on_step=keep)
    both = min(map(len, widths.values()))
    assert np.mean(widths[0][:both]) > np.mean(widths[1][:both])
    assert max(widths[0]) > 5  # more than its even share


def test_riders_that_bring_nothing_are_left_behind_and_tried_again() -> None:
    memory = Memory(100)
    strategies = lookfar.config.parse_strategy("auto+lookahead")
    engine = Engine(BoundModel(model_of("llama")), memory=memory, costs=CostCurve({1: 1.0, 64: 64.0}))
    engine.costs.refine = lambda *_: None  # type: ignore[method-assign, union-attr]
    seen = rows_of(engine, [Request(PROMPTS[1], NEW, strategies=strategies, budget="auto")])
    assert sum(map(len, seen[-1].riders)) == 0  # sixty riders for a third of a token do not pay here
    before = memory.rider_value
    for _ in range(200):
        memory.judge_riders(0)
    assert memory.rider_value < 0.1 * before
    low = memory.rider_value
    for _ in range(3000):
        memory.judge_riders(None)
    assert memory.rider_value > 10 * low


def test_the_curve_is_measured_once_and_kept() -> None:
    from lookfar.costs import REFINED_ENOUGH, cache_dir, keep_refined, machine_and_model, step_costs

    steps = EagerSteps(BoundModel(tiny_model("llama")))
    curve = step_costs(steps)
    assert (cache_dir() / "costs.json").exists()
    assert step_costs(steps).table(64).tolist() == curve.table(64).tolist()
    assert "float64" in machine_and_model(steps)
    curve.seconds *= np.linspace(1, 3, len(curve.seconds))
    keep_refined(steps, curve)  # too few real steps to believe them
    assert step_costs(steps).seconds[-1] < curve.seconds[-1]
    curve.refined = REFINED_ENOUGH
    keep_refined(steps, curve)
    assert step_costs(steps).seconds[-1] == pytest.approx(curve.seconds[-1])


@pytest.mark.parametrize("budget", [0, -1, 513, True, 2.5, "many"])
def test_a_budget_that_is_none(budget: object) -> None:
    with pytest.raises(ValueError, match="budget must be auto or a number of rows from 1 to 512"):
        lookfar.LM(model_of("llama"), budget=budget)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget must be"):
        lookfar.LM(model_of("llama")).generate([5], budget=budget)  # type: ignore[arg-type]


def test_a_budget_of_one_row_is_plain_decoding() -> None:
    done = lookfar.LM(model_of("llama"), budget=1).generate(PROMPTS[4], max_new_tokens=NEW)
    assert done.token_ids == expected_of("llama")[4]
    assert done.stats.rows == done.stats.steps == NEW


def test_requests_with_different_budgets_share_a_batch() -> None:
    engine = Engine(BoundModel(model_of("llama")), costs=FLAT)
    strategies = lookfar.config.parse_strategy("auto+lookahead")
    for mixture in (("auto", 2, 9, None, "auto"), (1, 2, 9, 40, 3), (None, 2, 9, 40, 1)):
        todo = [
            Request(prompt, NEW, strategies=strategies, budget=budget)  # type: ignore[arg-type]
            for prompt, budget in zip(PROMPTS, mixture, strict=True)
        ]
        seen = rows_of(engine, todo)
        assert [s.output for s in engine.run(todo)] == expected_of("llama")
        assert max(len(rows) for rows in seen if len(rows.chain) == 1) <= 1 + max(r.extra_rows for r in todo)


@pytest.mark.parametrize("budget", ["auto", 9, 40])
def test_riders_and_guesses_together_keep_to_the_promised_rows(budget: object) -> None:
    # The cache is reserved for so many rows and no more.
    engine = Engine(BoundModel(model_of("llama")), costs=FLAT)
    small, wide = lookfar.Lookahead(window=3, ngram=4, guesses=3), lookfar.Lookahead()
    for lookahead in (small, wide):
        engine.memory = Memory(engine.model.vocab_size)
        strategies = (*lookfar.config.AUTO, lookahead)
        request = Request(PROMPTS[4], NEW, strategies=strategies, budget=budget)  # type: ignore[arg-type]
        for rows in rows_of(engine, [request]):
            assert len(rows) - len(rows.chain) <= request.extra_rows


class Watcher:
    """Proposes what it is told and keeps the predictions it is shown, with the text they were made for."""

    name = "watcher"
    wants_predictions = True

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.seen: list[tuple[list[int], Outcome]] = []

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        rest = self.text[len(ids) :][: min(limit, 3)]
        return Proposal.of([[7, 8], [*rest[:2], 9], rest])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        self.seen.append((list(ids), outcome))


@pytest.mark.parametrize("prefill_rows", [8, 512])
def test_predictions_are_those_of_the_rows_they_are_said_to_be_of(prefill_rows: int) -> None:
    model, prompt = model_of("llama"), PROMPTS[1]
    watcher = Watcher(prompt + expected_of("llama")[1])

    @dataclass(frozen=True)
    class Watching(Strategy):
        max_rows = 9  # type: ignore[assignment]

        def start(self, request: Request, memory: Memory) -> list[Drafter]:
            return [watcher]

    engine = Engine(BoundModel(model), prefill_rows=prefill_rows)
    other = Request(PROMPTS[4], 10, strategies=(lookfar.Recycle(rows=5),))
    engine.run([Request(prompt, 10, strategies=(Watching(),)), other])  # together with rows of another sequence
    fed = 0
    for ids, outcome in watcher.seen:
        rows, start = outcome.predictions, len(ids) - len(outcome.emitted)
        assert rows is not None
        chain = len(rows.tokens) - len(outcome.tree)
        if not outcome.emitted:  # a piece of the prompt: the rows end where this piece ended
            start, fed = fed + chain, fed + chain
        for i in range(len(rows.tokens)):
            path: list[int] = []
            node = i - chain
            while node >= 0:
                path.insert(0, int(outcome.tree.tokens[node]))
                node = int(outcome.tree.parents[node])
            text = ids[:start] + path if i >= chain else ids[: start - chain + 1 + i]
            assert [rows.before[i], rows.tokens[i]] == [text[-2] if len(text) > 1 else -1, text[-1]]
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0, -1].float()
            assert rows.top_ids[i].tolist() == logits.topk(8).indices.tolist()
            assert np.allclose(rows.top_logits[i], logits.topk(8).values, atol=1e-4)
        if outcome.emitted:
            assert rows.top_ids[outcome.last, 0] == outcome.emitted[-1]
    learned = sum(len(o.predictions.tokens) - len(o.tree) for ids, o in watcher.seen if o.predictions)
    assert learned >= len(prompt)  # prompt rows among them
