"""Every source alone, all together, any budget, alone and in batches: the tokens of `generate`."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

import lookfar
from families import tiny_model
from helpers import eager_engine, random_prompts, reference, rows_of
from lookfar.core.plan import RunnerLimits
from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.drafters.registry import BUILTIN, auto_strategies, parse_strategy, strategy_class
from lookfar.drafters.scripted import Scripted
from lookfar.drafters.suffix import SuffixDrafter
from lookfar.engine.batch import StepBatch
from lookfar.engine.outputs import StepOutput
from lookfar.engine.request import Request, RequestState
from lookfar.models.binding import BoundModel
from lookfar.runners.eager import EagerRunner
from lookfar.speculation.controller import SpeculationController
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.cost_file import Experience
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.row_budget import AUTO_ROWS
from lookfar.speculation.speculator import Speculator, is_promising
from lookfar.testing import run_requests

PROMPTS = random_prompts(20, 33, 5, 1)
# A text with repetitions, so that there is something to copy.
PROMPTS.append(PROMPTS[0] + PROMPTS[0][:9] + PROMPTS[0] + PROMPTS[0][:4])
NEW = 24
OWN_STRATEGIES = sorted(set(BUILTIN) - {"draft_model", "mtp"})


def flat() -> CostCurve:
    return CostCurve({1: 1.0, 128: 1.0})


def fixed(curve: CostCurve) -> CostCurve:
    """A curve that real steps do not refine."""
    curve.refine = lambda *_: None  # type: ignore[method-assign]
    return curve


def expensive() -> CostCurve:
    return fixed(CostCurve({1: 1.0, 2: 10.0, 128: 1000.0}))


@cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family)


@cache
def expected_of(family: str) -> list[list[int]]:
    return [reference(model_of(family), prompt, NEW) for prompt in PROMPTS]


def every_strategy(family: str) -> list[Strategy]:
    return [*(strategy_class(name)() for name in OWN_STRATEGIES), lookfar.DraftModel(model=model_of(family), length=3)]


def automatic(prompt: list[int], new: int = NEW) -> Request:
    return Request(prompt, new, strategies=auto_strategies(), budget="auto")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize("budget", [None, 2, 9, 40])
def test_every_source_alone_and_all_of_them(family: str, budget: int | None) -> None:
    lm = lookfar.LM(model_of(family), prefill_chunk=16, max_batch=3)
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
    assert accepted > 100  # so this compared trees, and not decoding without speculation with itself


sources = st.lists(st.sampled_from(OWN_STRATEGIES), min_size=1, max_size=4, unique=True)
budgets = st.one_of(st.none(), st.just("auto"), st.integers(1, 70))


@pytest.mark.slow
@given(
    st.lists(st.tuples(sources, budgets), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([1, 7, 512]),
    st.sampled_from(["llama", "qwen2"]),
)
@settings(max_examples=40)
def test_any_mixture_of_strategies_and_budgets(
    mixture: list[tuple[list[str], int | str | None]], slots: int, prefill_chunk: int, family: str
) -> None:
    engine = eager_engine(model_of(family), costs=flat(), max_batch=slots, prefill_chunk=prefill_chunk)
    requests = []
    for i, prompt in enumerate(PROMPTS):
        names, budget = mixture[i % len(mixture)]
        strategies = tuple(strategy_class(name)() for name in names)
        requests.append(Request(prompt, 12, strategies=strategies, budget=budget))  # type: ignore[arg-type]
    for _ in range(2):  # the second time with a full draft state
        results = run_requests(engine, requests)
        assert [result.token_ids for result in results] == [tokens[:12] for tokens in expected_of(family)]


# The row budget


def test_where_rows_are_expensive_nothing_is_drafted() -> None:
    seen = rows_of(eager_engine(model_of("llama"), costs=expensive()), [automatic(PROMPTS[4])])
    assert all(len(rows.tree) == 0 for rows in seen if len(rows.pending) == 1)  # a prefill costs its rows anyway
    assert len(seen) > 10


def test_where_rows_are_free_they_are_used() -> None:
    seen = rows_of(eager_engine(model_of("llama"), costs=fixed(flat())), [automatic(PROMPTS[4])])
    assert max(len(rows.tree) for rows in seen) > 16
    assert all(len(rows) - rows.last_row <= AUTO_ROWS for rows in seen)


def test_the_time_of_the_host_is_paid_once_however_many_rows() -> None:
    engine = eager_engine(model_of("llama"), costs=expensive())
    controller = engine.speculator.controllers["1"] = SpeculationController()
    controller.learn = lambda *_: None  # type: ignore[method-assign]
    controller.host = Mock(table=lambda most: np.full(most + 1, 1e6, np.float32))
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert max(len(rows.tree) for rows in seen) > 16


def test_a_request_that_prefills_is_no_token_that_drafts_would_delay() -> None:
    """One draft token for one request, and a tenth more time: that pays if no other request waits for a token."""
    state = DraftState(96)
    costs = CostCurve({1: 1.0, 9: 1.0, 10: 1.1, 128: 100.0})
    one_token = Scripted(lambda ids: [[7]])
    states = [
        RequestState(Request(p, NEW, strategies=(one_token,), budget="auto"), i, i, state)
        for i, p in enumerate(PROMPTS[:2])
    ]
    states[0].num_cached = len(PROMPTS[0]) - 1

    def draft_tokens(*chunks: int) -> int:
        batch = StepBatch(states, list(chunks), 0.0)
        plan = Speculator(costs).plan(batch, RunnerLimits(512, padded=False))
        return sum(len(rows.tree) for rows in plan.requests)

    assert len(PROMPTS[1]) > 9
    assert draft_tokens(1, 8) == 1
    states[1].num_cached = len(PROMPTS[1]) - 8  # the same rows, but the second prefill comes to its end
    assert draft_tokens(1, 8) == 0


@pytest.mark.parametrize(
    ("second_row", "sampled", "begins"), [(1.3, False, True), (1.8, False, False), (1.3, True, False)]
)
def test_a_batch_begins_with_speculation_where_a_draft_for_each_request_is_likely_to_pay(
    second_row: float, sampled: bool, begins: bool
) -> None:
    costs = CostCurve({1: 1.0, 2: 1.0, 4: second_row})  # two requests with a draft each have four rows
    for count in (1, 2):
        facts: Any = SimpleNamespace(requests=[None] * count, samples=sampled)
        assert is_promising(costs, facts) == (begins or count == 1)


@pytest.mark.parametrize("budget", [0, -1, 513, True, 2.5, "many"])
def test_a_value_that_is_not_a_budget(budget: object) -> None:
    with pytest.raises(ValueError, match="budget must be auto or a number of rows from 1 to 512"):
        lookfar.LM(model_of("llama"), budget=budget)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget must be"):
        lookfar.LM(model_of("llama")).generate([5], budget=budget)


def test_a_budget_of_one_row_is_decoding_without_speculation() -> None:
    done = lookfar.LM(model_of("llama"), budget=1).generate(PROMPTS[4], max_new_tokens=NEW)
    assert done.token_ids == expected_of("llama")[4]
    assert done.stats.rows == done.stats.steps == NEW


@pytest.mark.parametrize("budget", ["auto", 9, 40])
def test_window_rows_and_draft_tokens_together_keep_to_the_reserved_rows(budget: object) -> None:
    engine = eager_engine(model_of("llama"), costs=flat())
    small, wide = lookfar.Lookahead(window=3, ngram=4, guesses=3), lookfar.Lookahead()
    for lookahead in (small, wide):
        engine.draft_state = DraftState(engine.runner.model.vocab_size)
        strategies = (*auto_strategies(), lookahead)
        request = Request(PROMPTS[4], NEW, strategies=strategies, budget=budget)  # type: ignore[arg-type]
        for rows in rows_of(engine, [request]):
            assert len(rows) - len(rows.pending) <= request.max_draft_rows


# Batches: what a request drafts does not depend on its neighbours


def test_a_strategy_with_its_own_rows_is_verified_beside_an_automatic_one() -> None:
    engine = eager_engine(model_of("llama"), costs=expensive())
    three = Scripted(lambda ids: [[7, 8, 9]])
    seen: dict[int, list[int]] = {0: [], 1: []}

    def keep(output: StepOutput) -> None:
        assert output.fed is not None
        if len(engine.scheduler.running) == 2 and len(output.fed.pending) == 1:
            seen[output.index].append(len(output.fed.tree))

    run_requests(engine, [Request(PROMPTS[0], NEW, strategies=(three,)), automatic(PROMPTS[1])], keep)
    assert len(seen[0]) > 5
    assert all(seen[0][:-3])  # however expensive rows are
    assert max(seen[1]) <= 3  # and its neighbour takes no more rows than padding costs anyway


def test_a_suffix_request_beside_an_automatic_one_gets_suffix_drafts_only() -> None:
    """In one batch a strategy was once fed recycled predictions because its neighbour recycled."""
    engine = eager_engine(tiny_model("llama", head_dim=8), costs=fixed(flat()))
    suffix = Request(PROMPTS[4], NEW, strategies=parse_strategy("suffix"))
    run_requests(engine, [automatic(PROMPTS[0])])  # fills the recycle table
    sources: dict[int, set[str]] = {0: set(), 1: set()}
    trees: list[list[tuple[int, ...]]] = []

    def keep(output: StepOutput) -> None:
        assert output.fed is not None
        tree = output.fed.tree
        sources[output.index] |= {tree.source(node) for node in range(len(tree))}
        if output.index == 0:
            trees.append([(int(t), int(p)) for t, p in zip(tree.tokens, tree.parents, strict=True)])

    mixed = run_requests(engine, [suffix, automatic(PROMPTS[0])], keep)
    assert sources[0] <= {"suffix", "store"}
    assert "recycle" in sources[1]
    beside, trees = trees, []
    engine.draft_state = DraftState(engine.runner.model.vocab_size)
    assert run_requests(engine, [suffix], keep)[0].token_ids == mixed[0].token_ids
    assert all(set(alone) <= set(both) for alone, both in zip(trees[1:], beside[1:], strict=False))


def test_requests_with_different_budgets_share_a_batch() -> None:
    engine = eager_engine(model_of("llama"), costs=flat())
    strategies = parse_strategy("auto+lookahead")
    for mixture in (("auto", 2, 9, None, "auto"), (1, 2, 9, 40, 3), (None, 2, 9, 40, 1)):
        requests = [
            Request(prompt, NEW, strategies=strategies, budget=budget)  # type: ignore[arg-type]
            for prompt, budget in zip(PROMPTS, mixture, strict=True)
        ]
        most: dict[int, int] = dict.fromkeys(range(5), 0)

        def keep(output: StepOutput, most: dict[int, int] = most) -> None:
            if output.fed is not None and len(output.fed.pending) == 1:
                most[output.index] = max(most[output.index], len(output.fed))

        assert [r.token_ids for r in run_requests(engine, requests, keep)] == expected_of("llama")
        assert all(rows <= 1 + requests[i].max_draft_rows for i, rows in most.items())


def test_confident_requests_of_a_batch_take_more_rows() -> None:
    # One repeats itself, the other is new: with one heap for both, the first gets the most rows.
    lm = lookfar.LM(model_of("llama"), max_batch=2)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
    widths: dict[int, list[int]] = {0: [], 1: []}

    def keep(output: StepOutput) -> None:
        assert output.fed is not None
        widths[output.index].append(len(output.fed.tree))

    fresh = [90 - token for token in PROMPTS[1]]
    lm.generate([PROMPTS[0], fresh], max_new_tokens=NEW, strategy="suffix", budget=6, on_step=keep)
    both = min(map(len, widths.values()))
    assert np.mean(widths[0][:both]) > np.mean(widths[1][:both])
    assert max(widths[0]) > 5  # more than its even share


def test_requests_with_draft_states_of_their_own_share_a_batch() -> None:
    engine = eager_engine(model_of("llama"), costs=fixed(flat()))
    states = [DraftState(engine.runner.model.vocab_size) for _ in range(2)]
    requests = [
        Request(PROMPTS[4], NEW, strategies=auto_strategies(), budget=20, draft_state=state) for state in states
    ]
    results = run_requests(engine, requests)
    assert [result.token_ids for result in results] == [expected_of("llama")[4]] * 2
    assert [state.store.tokens > 0 for state in states] == [True, True]
    assert engine.draft_state.store.tokens == 0


# Learning


@pytest.mark.parametrize("prefill_chunk", [512, 3, 1])
def test_prompts_are_learned_while_speculation_is_off(prefill_chunk: int) -> None:
    engine = eager_engine(model_of("llama"), costs=flat(), prefill_chunk=prefill_chunk)
    controller = engine.speculator.controllers["1"] = SpeculationController()
    controller.speculating, controller._wait = False, 1 << 30
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert all(len(rows.tree) == 0 for rows in seen)
    learned = engine.draft_state.sources.recycle_table.arrays.token_ids[:, 0] >= 0
    # A prompt token in a step of its own looks like a decoded one.
    assert set(np.flatnonzero(learned)) >= set(PROMPTS[4][:-1])


def test_prefills_teach_the_controller_nothing() -> None:
    engine = eager_engine(model_of("llama"), costs=flat(), prefill_chunk=8)
    controller, learned = SpeculationController(), []
    engine.speculator.controllers["1"] = controller
    controller.learn = lambda *arguments: learned.append(arguments)  # type: ignore[method-assign]
    seen = rows_of(engine, [automatic(PROMPTS[4])])
    assert len(PROMPTS[4]) > 8
    assert len(learned) == len(seen) - 2  # the first one also prefilled, and none follows the last
    assert all(tokens >= 1 and seconds > 0 and cost > 0 for _, tokens, seconds, cost, _ in learned)


def test_prompts_of_a_batch_that_does_not_speculate_are_not_predicted() -> None:
    predicted = {}
    for speculating in (True, False):
        engine = eager_engine(model_of("llama"), costs=flat(), prefill_chunk=512)
        controller = engine.speculator.controllers["2"] = SpeculationController(2)
        controller.speculating, controller._must_try, controller._wait = speculating, False, 1 << 30
        seen = rows_of(engine, [automatic(PROMPTS[4]), automatic(PROMPTS[1])])
        predicted[speculating] = sum(rows.predict for rows in seen if len(rows.pending) > 1)
    assert predicted[True] > predicted[False] == 0


def test_windows_that_bring_nothing_are_left_out_and_tried_again() -> None:
    state = DraftState(100)
    engine = eager_engine(model_of("llama"), state, fixed(CostCurve({1: 1.0, 64: 64.0})))
    seen = rows_of(engine, [Request(PROMPTS[1], NEW, strategies=parse_strategy("auto+lookahead"), budget="auto")])
    assert sum(map(len, seen[-1].windows)) == 0  # sixty rows for a third of a token do not pay here
    before = state.window_value
    for _ in range(200):
        state.update_window_value(0)
    assert state.window_value < 0.1 * before
    low = state.window_value
    for _ in range(3000):
        state.update_window_value(None)
    assert state.window_value > 10 * low


def test_the_cost_curve_is_measured_once_and_kept() -> None:
    from lookfar.engine.costs import (
        REFINED_ENOUGH,
        cache_dir,
        known_costs,
        machine_and_model,
        save_refined_costs,
    )

    runner = EagerRunner(BoundModel(tiny_model("llama")))
    cache = runner.create_cache()
    curve = known_costs(runner, cache, 8).curve
    assert (cache_dir() / "costs.json").exists()
    assert known_costs(runner, cache, 8).curve.table(64).tolist() == curve.table(64).tolist()
    assert "float64" in machine_and_model(runner)
    curve.seconds *= np.linspace(1, 3, len(curve.seconds))
    save_refined_costs(runner, curve, {})  # too few real steps to trust them
    assert known_costs(runner, cache, 8).curve.seconds[-1] < curve.seconds[-1]
    curve.refined = REFINED_ENOUGH
    save_refined_costs(runner, curve, {"8": Experience(False, 0.5, 1e-6)})
    known = known_costs(runner, cache, 8)
    assert known.curve.seconds[-1] == pytest.approx(curve.seconds[-1])
    speculator = Speculator()
    speculator.use_costs(known)
    assert speculator.experience == {"8": Experience(False, 0.5, 1e-6)}


class Watcher:
    """Proposes what it is told and records the predictions that it observes, with their text."""

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


@pytest.mark.parametrize("prefill_chunk", [8, 512])
def test_predictions_belong_to_their_rows(prefill_chunk: int) -> None:
    model, prompt = model_of("llama"), PROMPTS[1]
    watcher = Watcher(prompt + expected_of("llama")[1])

    @dataclass(frozen=True)
    class Watching(Strategy):
        max_rows = 9  # type: ignore[assignment]

        def create(self, context: DraftContext) -> list[Drafter]:
            return [watcher]

    engine = eager_engine(model, prefill_chunk=prefill_chunk)
    other = Request(PROMPTS[4], 10, strategies=(lookfar.Recycle(rows=5),))
    run_requests(engine, [Request(prompt, 10, strategies=(Watching(),)), other])  # with rows of another request
    fed = 0
    for ids, outcome in watcher.seen:
        rows, start = outcome.predictions, len(ids) - len(outcome.emitted)
        assert rows is not None
        pending = len(rows.tokens) - len(outcome.tree)
        if not outcome.emitted:  # a prefill chunk: the rows end where the chunk ended
            start, fed = fed + pending, fed + pending
        for i in range(len(rows.tokens)):
            path: list[int] = []
            node = i - pending
            while node >= 0:
                path.insert(0, int(outcome.tree.tokens[node]))
                node = int(outcome.tree.parents[node])
            text = ids[:start] + path if i >= pending else ids[: start - pending + 1 + i]
            assert [rows.before[i], rows.tokens[i]] == [text[-2] if len(text) > 1 else -1, text[-1]]
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0, -1].float()
            assert rows.top_ids[i].tolist() == logits.topk(8).indices.tolist()
            assert np.allclose(rows.top_logits[i], logits.topk(8).values, atol=1e-4)
        if outcome.emitted:
            assert rows.top_ids[outcome.last, 0] == outcome.emitted[-1]
    learned = sum(len(o.predictions.tokens) - len(o.tree) for _, o in watcher.seen if o.predictions)
    assert learned >= len(prompt)  # prompt rows among them


def test_nothing_of_finished_requests_is_kept() -> None:
    """Drafters of a batch are put together and kept while its requests run, and no longer."""
    lm = lookfar.LM(model_of("llama"), budget=8)
    lm.generate(PROMPTS[:3], max_new_tokens=NEW)
    lm.driver.call(gc.collect)
    assert not [found for found in gc.get_objects() if type(found) is SuffixDrafter]
