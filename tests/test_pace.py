"""Guessing stops where it does not pay, and is tried again."""

from __future__ import annotations

import random

import pytest

from lookfar.pace import PLAIN, RECENT, Pace


def run(pace: Pace, steps: int, guess_seconds: float, tokens: int, plain_seconds: float, expected: float) -> float:
    """Tokens per second over some steps."""
    done = seconds = 0.0
    for _ in range(steps):
        guess = pace.guess_next(expected)
        took, came = (guess_seconds, tokens) if guess else (plain_seconds, 1)
        pace.learn(guess, came, took, 0.0)
        done, seconds = done + came, seconds + took
    return done / seconds


def test_guesses_that_pay_are_never_interrupted() -> None:
    pace = Pace()
    assert run(pace, 1000, 2.0, 3, 1.0, expected=1.0) == pytest.approx(1.5)


def test_plain_steps_take_over_where_guessing_costs_too_much() -> None:
    pace = Pace()
    run(pace, 600, 7.0, 2, 1.0, expected=1.1)
    assert not pace.guessing
    assert run(pace, 5000, 7.0, 2, 1.0, expected=1.1) > 0.96  # of plain decoding


def test_single_slow_steps_change_nothing() -> None:
    pace = Pace()
    for step in range(200):
        assert pace.guess_next(1.0)
        pace.learn(True, 3, 60.0 if step % 5 == 0 else 2.0, 0.0)


def test_an_expectation_that_is_not_met_is_forgotten_for_longer_and_longer() -> None:
    pace = Pace()
    plain = 0
    for _ in range(3000):
        guess = pace.guess_next(9.0)
        plain += not guess
        pace.learn(guess, 3 if guess else 1, 2.0 if guess else 1.0, 0.0)
    assert pace.guessing
    assert plain <= 6 * PLAIN


def test_guessing_comes_back_when_it_pays() -> None:
    pace = Pace()
    run(pace, RECENT + PLAIN, 7.0, 2, 1.0, expected=1.1)
    assert not pace.guessing
    run(pace, 5 * RECENT, 1.2, 3, 1.0, expected=1.1)
    assert pace.guessing


def test_a_stretch_of_bad_luck_is_not_the_end_of_guessing() -> None:
    """Guessed steps bring one token or many: one sequence of a batch of one needs many of them to tell."""
    chance, pace = random.Random(0), Pace()
    guessed = 0
    for _ in range(5000):
        guess = pace.guess_next(1.0)
        guessed += guess
        tokens = 1
        while guess and tokens < 12 and chance.random() < 0.55:  # 2.2 on average
            tokens += 1
        pace.learn(guess, tokens, 1.4 if guess else 1.1, 0.0)
    assert guessed > 4800


def test_many_sequences_tell_sooner() -> None:
    pace = Pace(32)
    run(pace, 40, 7.0, 2, 1.0, expected=1.1)
    assert not pace.guessing


def test_the_overhead_follows_guessed_steps() -> None:
    pace = Pace()
    for _ in range(100):
        pace.learn(True, 1, 3.0, 0.5)
        pace.learn(False, 1, 1.0, 9.0)
    assert pace.overhead == pytest.approx(0.5, abs=0.01)
