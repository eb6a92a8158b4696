"""Guessing stops where it does not pay, and is tried again."""

from __future__ import annotations

import pytest

from lookfar.pace import FIRST, RECENT, TRIES, Pace


def run(pace: Pace, steps: int, guess_seconds: float, tokens: int, plain_seconds: float, expected: float) -> float:
    """Tokens per second over some steps."""
    done = seconds = 0.0
    for _ in range(steps):
        guess = pace.guess_next(expected)
        took, came = (guess_seconds, tokens) if guess else (plain_seconds, 1)
        pace.learn(guess, came, took)
        done, seconds = done + came, seconds + took
    return done / seconds


def test_guesses_that_pay_are_never_interrupted() -> None:
    pace = Pace()
    assert run(pace, 1000, 2.0, 3, 1.0, expected=1.0) == pytest.approx(1.5)


def test_plain_steps_take_over_where_guessing_costs_too_much() -> None:
    pace = Pace()
    run(pace, 600, 7.0, 2, 1.0, expected=1.1)
    assert not pace.guessing
    assert run(pace, 5000, 7.0, 2, 1.0, expected=1.1) > 0.97  # of plain decoding


def test_single_slow_steps_change_nothing() -> None:
    pace = Pace()
    for step in range(200):
        assert pace.guess_next(1.0)
        pace.learn(True, 3, 60.0 if step % 5 == 0 else 2.0)


def test_an_expectation_that_is_not_met_is_forgotten_for_longer_and_longer() -> None:
    pace = Pace()
    plain = 0
    for _ in range(20 * FIRST):
        guess = pace.guess_next(9.0)
        plain += not guess
        pace.learn(guess, 3 if guess else 1, 2.0 if guess else 1.0)
    assert pace.guessing
    assert plain <= 6 * TRIES


def test_guessing_comes_back_when_it_pays() -> None:
    pace = Pace()
    run(pace, RECENT + TRIES, 7.0, 2, 1.0, expected=1.1)
    assert not pace.guessing
    run(pace, 2 * FIRST + 2 * TRIES, 1.2, 3, 1.0, expected=1.1)
    assert pace.guessing
