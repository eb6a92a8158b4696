"""The speculation controller: speculation stops where it does not pay, and is tried again."""

from __future__ import annotations

import math
import random

import pytest

from lookfar.speculation.controller import (
    BASE_STEPS,
    CLEARLY_SLOWER,
    EARLY_STEPS,
    MAX_EARLY,
    MIN_STEPS,
    REGRET,
    SPECULATIVE_STEPS,
    SpeculationController,
)
from lookfar.speculation.cost_file import Experience


def run(
    controller: SpeculationController, steps: int, seconds: tuple[float, float], tokens: int, expected: float
) -> float:
    """Tokens per second over some steps, given the seconds of a step with and without speculation."""
    emitted = total = 0.0
    for _ in range(steps):
        speculates = controller.decide(expected)
        took, came = (seconds[0], tokens) if speculates else (seconds[1], 1)
        controller.learn(speculates, came, took)
        emitted, total = emitted + came, total + took
    return emitted / total


def test_speculation_that_pays_is_never_interrupted() -> None:
    controller = SpeculationController()
    assert run(controller, 1000, (2.0, 1.0), 3, expected=1.0) == pytest.approx(1.5)


def test_it_is_switched_off_where_it_costs_too_much() -> None:
    controller = SpeculationController()
    run(controller, 600, (7.0, 1.0), 2, expected=1.1)
    assert not controller.speculating
    assert run(controller, 5000, (7.0, 1.0), 2, expected=1.1) > 0.96  # of the rate without speculation


def test_single_slow_steps_change_nothing() -> None:
    controller = SpeculationController()
    for step in range(200):
        assert controller.decide(1.0)
        controller.learn(True, 3, 60.0 if step % 5 == 0 else 2.0)


def test_a_trial_that_fails_is_repeated_more_and_more_rarely() -> None:
    controller = SpeculationController()
    plain = 0
    for _ in range(3000):
        speculates = controller.decide(9.0)
        plain += not speculates
        controller.learn(speculates, 3 if speculates else 1, 2.0 if speculates else 1.0)
    assert controller.speculating
    assert plain <= 6 * BASE_STEPS


def test_texts_that_change_are_noticed_in_a_batch() -> None:
    controller = SpeculationController(8)
    run(controller, 3000, (1.5, 1.0), 3, expected=1.0)
    assert controller.speculating
    lost = 100 / run(controller, 100, (1.5, 1.0), 1, expected=0.5)  # seconds: drafts are of no use any more
    assert not controller.speculating
    assert lost < 100 + 0.5 * 30


def test_slow_steps_count_if_they_are_many() -> None:
    controller = SpeculationController(32)
    for step in range(60):
        speculates = controller.decide(20.0)
        controller.learn(speculates, 48 if speculates else 32, (2.0 if step % 3 else 8.0) if speculates else 2.0)
    assert not controller.speculating


def test_it_is_switched_on_again_when_it_pays() -> None:
    controller = SpeculationController()
    run(controller, SPECULATIVE_STEPS + BASE_STEPS, (7.0, 1.0), 2, expected=1.1)
    assert not controller.speculating
    controller.restart()  # the next request
    run(controller, 2 * SPECULATIVE_STEPS, (1.2, 1.0), 3, expected=1.1)
    assert controller.speculating


def test_a_run_of_bad_steps_does_not_switch_it_off() -> None:
    """Speculative steps emit one token or many: one request needs many of them for a decision."""
    chance, controller = random.Random(0), SpeculationController()
    speculated = 0
    for _ in range(5000):
        speculates = controller.decide(1.0)
        speculated += speculates
        tokens = 1
        while speculates and tokens < 12 and chance.random() < 0.55:  # 2.2 on average
            tokens += 1
        controller.learn(speculates, tokens, 1.4 if speculates else 1.1)
    assert speculated > 4800


@pytest.mark.parametrize("seed", range(4))
def test_a_load_that_changes_does_not_switch_it_off(seed: int) -> None:
    """Steps take a third less or a half more than usual for dozens of steps on end, whatever their mode."""
    chance, controller = random.Random(seed), SpeculationController()
    speculated, load = 0, 0.0
    for _ in range(4000):
        load = 0.95 * load + 0.31 * chance.gauss(0, 0.3)
        speculates = controller.decide(math.exp(-load))
        speculated += speculates
        rows = chance.choice((1.1, 1.2, 1.4)) if speculates else 1.0
        tokens = 1 + speculates * chance.choice((0, 0, 0.5, 1.5))
        controller.learn(speculates, tokens, rows * math.exp(load), rows)
    assert speculated > 3000  # it pays: 1.5 tokens for 1.23 times the time


def test_steps_without_tokens_teach_nothing() -> None:
    """All requests of a step may fail, in the middle of a trial too."""
    controller = SpeculationController()
    for step in range(400):
        speculates = controller.decide(1.1)
        controller.learn(speculates, 0 if step % 3 else 1, 3.0 if speculates else 1.0)
    assert not controller.speculating


def test_many_requests_decide_sooner() -> None:
    controller = SpeculationController(32)
    run(controller, 40, (7.0, 1.0), 2, expected=1.1)
    assert not controller.speculating


@pytest.mark.parametrize("requests", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("cost", [1.1, 1.3, 2.0])
def test_the_first_steps_lose_little_where_nothing_is_accepted(requests: int, cost: float) -> None:
    """Of the first hundred steps, and of all, where speculative steps emit one token per request and take longer."""
    controller = SpeculationController(requests)
    took = []
    for _ in range(4000):
        speculates = controller.decide(requests / 1.0)
        took.append(cost if speculates else 1.0)
        controller.learn(speculates, requests, took[-1])
    early = min(EARLY_STEPS // requests, MAX_EARLY)
    first = early if cost > 1 / CLEARLY_SLOWER else SPECULATIVE_STEPS // requests
    first = max(first, MIN_STEPS) + 1 + max(early, MIN_STEPS)  # as many again behind the trial
    assert sum(took[:100]) <= 100 + first * (cost - 1) + 100 * REGRET
    assert sum(took) / len(took) < 1.015


def test_what_earlier_processes_learned_is_where_it_starts() -> None:
    controller = SpeculationController(32, Experience(False, 0.003, 2e-6))
    assert not controller.decide(1.0)
    assert (controller.host.fixed, controller.host.per_row) == (0.003, 2e-6)
    run(controller, 400, (1.2, 1.0), 3, expected=1.1)
    assert controller.speculating


def test_a_batch_tries_to_do_without_whatever_is_expected() -> None:
    """What a step without speculation costs is known from single requests only."""
    controller = SpeculationController(8)
    run(controller, 40, (3.5, 1.8), 13, expected=0.1)
    assert controller.speculating
    controller = SpeculationController(8)
    for _ in range(60):
        speculates = controller.decide(0.1)
        controller.learn(speculates, 13 if speculates else 8, 3.5 if speculates else 1.8)
    assert not controller.speculating


@pytest.mark.parametrize(("tokens", "pays"), [(1.3, True), (1.05, False)])
def test_a_sampled_batch_begins_without_speculation_and_finds_out_whether_it_pays(tokens: float, pays: bool) -> None:
    controller, speculated = SpeculationController(8, speculates=False), []
    for _ in range(600):
        speculated.append(controller.decide(1.0))
        controller.learn(speculated[-1], tokens if speculated[-1] else 1.0, 1.1 if speculated[-1] else 1.0)
    assert not any(speculated[:16])
    assert (sum(speculated[100:]) > 400) == pays
    if not pays:
        assert sum(speculated) < 90


@pytest.mark.parametrize("slowdown", [1.0, 1.05, 1.3])
def test_drafting_rests_where_no_draft_is_worth_its_row(slowdown: float) -> None:
    controller, speculated = SpeculationController(), []
    for _ in range(4000):
        speculated.append(controller.decide(1.0))
        controller.learn(speculated[-1], 1.0, slowdown if speculated[-1] else 1.0, 1.0, drafted=False)
    lost = (slowdown - 1) * sum(speculated) / len(speculated)
    assert lost < 0.012
    assert sum(speculated[2000:]) >= 8  # it goes on looking


def test_drafting_goes_on_when_there_is_something_to_draft_again() -> None:
    controller, speculated = SpeculationController(), []
    for step in range(1200):
        predictable = step >= 600
        speculated.append(controller.decide(1.0))
        drafted = speculated[-1] and predictable
        controller.learn(speculated[-1], 3.0 if drafted else 1.0, 1.4 if drafted else 1.05, 1.0, drafted)
    assert sum(speculated[:600]) < 200
    assert sum(speculated[700:]) > 450
