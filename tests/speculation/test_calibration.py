"""Calibration: estimates that are wrong in a steady way come out right."""

from __future__ import annotations

import numpy as np
import pytest

from lookfar.speculation.calibration import Calibration

SCORES = np.array([0.9, 0.5, 0.1, 0.01], np.float32)
TRUTH = np.array([0.7, 0.4, 0.12, 0.02], np.float32)


def test_without_experience_estimates_stay() -> None:
    assert Calibration().apply(SCORES) == pytest.approx(SCORES)
    assert Calibration().apply(np.zeros(0, np.float32)).shape == (0,)


def test_estimates_follow_what_was_accepted() -> None:
    calibration, random = Calibration(), np.random.default_rng(0)
    for _ in range(20_000):
        calibration.learn(SCORES, np.flatnonzero(random.random(4) < TRUTH).astype(np.int32))
    assert calibration.apply(SCORES) == pytest.approx(TRUTH, rel=0.25)


def test_it_follows_changes_and_stays_a_probability() -> None:
    calibration = Calibration()
    for _ in range(2000):
        calibration.learn(SCORES, np.zeros(0, np.int32))
    assert (calibration.apply(SCORES) < 0.1 * SCORES).all()
    for _ in range(2000):
        calibration.learn(SCORES, np.arange(4, dtype=np.int32))
    scaled = calibration.apply(np.array([0.0, 1e-9, 0.5, 1.0], np.float32))
    assert (scaled >= 0).all()
    assert (scaled < 1).all()
    assert np.isfinite(calibration.counts).all()
