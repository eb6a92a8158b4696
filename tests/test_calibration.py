"""Estimates become what happens."""

from __future__ import annotations

import numpy as np
import pytest

from lookfar.calibration import Calibration, first_weights
from lookfar.forest import Luck, Offers, grow_forest
from lookfar.successors import NO_SUCCESSORS


def offers(draft: list[int], grade: int) -> Offers:
    one = np.array
    return Offers(
        drafts=one([draft], np.int32),
        grades=one([grade], np.int32),
        weights=np.ones(1, np.float32),
        sources=np.zeros(1, np.int32),
        starts=one([0, 1], np.int32),
        roots=one([[1, 2]], np.int32),
        runners=np.full((1, 7), -1, np.int32),
        runner_logits=np.zeros((1, 7), np.float32),
        luck=Luck.unknown(1),
        limits=one([9], np.int32),
    )


def room(each: int) -> np.ndarray:
    return np.full(1, each, np.int32)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_estimates_follow_what_happens(chance: float) -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration(["suffix"])
    for _ in range(1500):
        forest = grow_forest(offers([5, 6], 3), NO_SUCCESSORS, calibration, 8, room(8), 0.0)
        truth = [5 if rng.random() < chance else 9, 6 if rng.random() < chance else 9]
        forest.teach(0, np.array(truth, np.int32), calibration)
    scores = grow_forest(offers([5, 6], 3), NO_SUCCESSORS, calibration, 8, room(8), 0.0).scores
    assert scores[1] == pytest.approx(chance, abs=0.12)
    assert scores[2] == pytest.approx(chance**2, abs=0.15)
    untouched = grow_forest(offers([5, 6], 9), NO_SUCCESSORS, Calibration(["suffix"]), 8, room(8), 0.0).scores
    assert untouched[1] > 0.5  # a long match is believed from the start


def test_only_places_that_the_text_reached_teach() -> None:
    calibration = Calibration(["suffix"])
    forest = grow_forest(offers([5, 6], 3), NO_SUCCESSORS, calibration, 8, room(8), 0.0)
    forest.teach(0, np.array([8, 6], np.int32), calibration)
    changed = np.flatnonzero(calibration.weights != first_weights(1))
    first, second = set(forest.features[1].tolist()), set(forest.features[2].tolist())
    assert set(changed.tolist()) <= first
    assert not set(changed.tolist()) & (second - first)
