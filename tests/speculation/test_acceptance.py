"""The acceptance model: estimates become what happens."""

from __future__ import annotations

import numpy as np
import pytest

from lookfar.retrieval.recycle_table import NO_RECYCLING
from lookfar.speculation.acceptance import AcceptanceModel, initial_weights
from lookfar.speculation.candidates import BuildLimits, Candidates, DraftArrays, NoiseArrays, RootArrays
from lookfar.speculation.proposals import no_off_path
from lookfar.speculation.tree_builder import BuildInputs, build_candidates


def build(draft: list[int], score: int, acceptance: AcceptanceModel) -> Candidates:
    one = np.array
    weights, sources = np.ones(1, np.float32), np.zeros(1, np.int32)
    drafts = DraftArrays(one([draft], np.int32), one([score], np.int32), weights, sources, one([0], np.int32))
    runner_ups = np.full((1, 7), -1, np.int32), np.zeros((1, 7), np.float32)
    roots = RootArrays(one([[1, 2, 9, 0]], np.int32), *runner_ups, no_off_path(1), np.ones(1, np.float32))
    inputs = BuildInputs(drafts, roots, NoiseArrays.unknown(1), NO_RECYCLING, acceptance)
    return build_candidates(inputs, BuildLimits(8, np.full(1, 8, np.int32), np.zeros(1, np.float32), 100))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_estimates_follow_what_happens(chance: float) -> None:
    rng = np.random.default_rng(0)
    acceptance = AcceptanceModel(["suffix"])
    for _ in range(1500):
        found = build([5, 6], 3, acceptance)
        truth = [5 if rng.random() < chance else 9, 6 if rng.random() < chance else 9]
        found.learn(np.array(truth, np.int32), np.array([0, len(truth)], np.int32), acceptance)
    scores = build([5, 6], 3, acceptance).scores
    assert scores[1] == pytest.approx(chance, abs=0.12)
    assert scores[2] == pytest.approx(chance**2, abs=0.15)
    assert build([5, 6], 9, AcceptanceModel(["suffix"])).scores[1] > 0.5  # a long match is trusted from the start


def test_only_nodes_that_the_text_reached_teach() -> None:
    acceptance = AcceptanceModel(["suffix"])
    found = build([5, 6], 3, acceptance)
    found.learn(np.array([8, 6], np.int32), np.array([0, 2], np.int32), acceptance)
    changed = np.flatnonzero(acceptance.weights != initial_weights(1))
    first, second = set(found.features[1].tolist()), set(found.features[2].tolist())
    assert set(changed.tolist()) <= first
    assert not set(changed.tolist()) & (second - first)


def test_drafts_that_are_never_accepted_are_still_built() -> None:
    """Their scores underflow to 0, which must not be divided by."""
    from families import tiny_model
    from helpers import random_prompts, reference
    from lookfar.lm import LM

    lm = LM(tiny_model("llama"), budget=8)
    (prompt,) = random_prompts(20)
    lm.generate(prompt, max_new_tokens=8)
    for model in lm.draft_state.acceptance_models:
        model.weights[:] = -1e4
    assert lm.generate(prompt, max_new_tokens=8).token_ids == reference(lm.model, prompt, 8)
