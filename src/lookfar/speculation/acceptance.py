"""The acceptance model: the probability that a draft token is accepted, learned online from every step.

A draft token comes with evidence: its depth, what each source says for or against it, its probability among the
predictions that are recycled after this token or pair, its rank among the runner-ups, and when sampling, how much the
noise at its position favours it. Each kind of evidence is a *feature* with a weight; the sum of the weights is the
log-odds of acceptance (logistic regression). The next tokens of the text label every candidate at every accepted
position, whether it was verified or not, so nothing has to be verified just to learn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from lookfar.core.arrays import Floats
from lookfar.core.jit import jit
from lookfar.retrieval.off_path import CLASSES, MASSES
from lookfar.speculation.calibration import Calibration
from lookfar.speculation.initial_weights import (
    CROSSED_WEIGHTS,
    DEPTH_WEIGHTS,
    OFF_PATH_WEIGHTS,
    RUNNER_UP_WEIGHTS,
    SEEN_WEIGHTS,
    TABLE_WEIGHTS,
)

LAYOUT = 2  # of the features below; weights in a file with another one are not used

# Offsets of the features in the weight vector. Feature 0 of a group means "no evidence".
DEPTH, DEPTHS = 0, 12
RUNNER_UP, RUNNER_UPS = DEPTH + DEPTHS, 10  # absent, then by rank
TABLES = RUNNER_UP + RUNNER_UPS
LEVELS = 11  # levels of a recycled probability, the highest first
STATES = 1 + 2 * LEVELS  # absent; predicted, by level; not predicted, by the level of the best prediction
AGES = 5  # of a row of a table; the last one is that of the prior
TABLE = AGES * STATES
TABLE_COUNT = 3  # after the last token, after the last pair, after the last three
CROSSED = LEVELS + 2  # absent, by level, not predicted
CROSSES = TABLES + TABLE_COUNT * TABLE  # token and pair together, pair and triple together
SEEN, SEEN_AGES = CROSSES + 2 * CROSSED * CROSSED, 16  # since a token was last part of a text; 0: never
OFF_PATH = SEEN + SEEN_AGES  # for the next token and for those behind it: absent, then by kind
OFF_PATH_KINDS = 1 + MASSES * CLASSES
NOISE = OFF_PATH + 2 * OFF_PATH_KINDS
NOISE_LEVELS = 8  # levels of the noise that a token meets, the most favourable first
NOISE_FEATURES = 1 + 2 * NOISE_LEVELS  # unknown; of a token that no table predicts; of one that a table predicts
DRAFTS = NOISE + NOISE_FEATURES
SCORES = 16  # match scores of a drafter, on its own scale
SHARES = 3  # share of the drafts with the best match that support the token: few, half, most
AGAINST = 1  # other tokens are drafted, by the match score of the best of those drafts
FOR = AGAINST + SCORES
SOURCE = FOR + SCORES * SHARES * 2  # for the token: match score, share, and whether it is the best score here

LEVEL_BOUNDS = np.array([0.97, 0.88, 0.7, 0.5, 0.3, 0.15, 0.07, 0.03, 0.012, 0.005], dtype=np.float32)
NOISE_BOUNDS = np.array([0.05, 0.15, 0.35, 0.7, 1.2, 2.0, 3.0], dtype=np.float32)
NOISE_LOG_ODDS = np.array([3.0, 2.2, 1.4, 0.7, 0.1, -0.4, -0.9, -1.4], dtype=np.float32)  # about -log(noise)

LEARNING_RATE = 0.12
MAX_CHILDREN = 48  # candidates considered after one node
ONE = np.float32(1.0)  # a literal would make the sums around it double precision, which takes a fifth longer
PRIOR_STRENGTH = 1.0  # how many uncertain observations the initial weights are worth


class AcceptanceModel:
    """The weights for one set of sources."""

    def __init__(self, sources: Seq[str]) -> None:
        self.sources = tuple(sources)
        self.weights = initial_weights(len(self.sources))
        self.squares: Floats = np.full(len(self.weights), PRIOR_STRENGTH, dtype=np.float32)  # for Adagrad
        self.calibration = Calibration()

    @property
    def arrays(self) -> dict[str, Floats]:
        """Everything that was learned."""
        return {"weights": self.weights, "squares": self.squares, "calibration": self.calibration.counts}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any] | None]) -> bool:
        """Take over the arrays of a model with the same sources and features; returns False if they are not sound."""
        for name, own in self.arrays.items():
            new = arrays.get(name)
            if new is None or new.shape != own.shape or new.dtype != own.dtype or not np.isfinite(new).all():
                return False
            if name != "weights" and not (new > 0).all():
                return False
        for name, own in self.arrays.items():
            own[:] = arrays[name]
        return True


def initial_weights(source_count: int) -> Floats:
    """Return the initial weights: rounded values learned with the demo model."""
    weights = np.zeros(DRAFTS + source_count * SOURCE, dtype=np.float32)
    learned = DEPTH_WEIGHTS + RUNNER_UP_WEIGHTS + TABLE_WEIGHTS + CROSSED_WEIGHTS + SEEN_WEIGHTS + OFF_PATH_WEIGHTS
    weights[:NOISE] = [float(weight) for weight in learned.split()]
    weights[NOISE + 1 : NOISE + 1 + NOISE_LEVELS] = NOISE_LOG_ODDS
    for source in range(source_count):
        start = DRAFTS + source * SOURCE
        weights[start + AGAINST : start + FOR] = np.linspace(0.0, -2.5, SCORES)
        for score in range(SCORES):
            for share in range(SHARES):
                for best in range(2):
                    place = start + FOR + (score * SHARES + share) * 2 + best
                    weights[place] = 0.5 + 0.35 * score + 0.7 * (share - 1) + 0.5 * (best - 1)
    return weights


@jit
def to_chances(log_odds, count):  # type: ignore[no-untyped-def]
    """Turn log-odds of tokens that exclude each other into probabilities; returns the factor that makes their sum 1.

    The factor is 1 if the sum is less.
    """
    total = ONE - ONE
    for i in range(count):
        log_odds[i] = ONE / (ONE + np.exp(-log_odds[i]))
        total += log_odds[i]
    return ONE / max(total, ONE)


@jit
def learn_along_path(weights, squares, candidates, node, emitted):  # type: ignore[no-untyped-def]
    """Learn from the children of `node` and of each accepted node; the emitted tokens label them.

    One step of logistic regression for each child, with a learning rate of its own for each weight (Adagrad). Estimates
    that add up to more than 1 are scaled, as they are when trees are built.
    """
    features, tokens, first_child, child_count = candidates
    chances = np.empty(MAX_CHILDREN, np.float32)
    for token in emitted:
        if node < 0 or first_child[node] < 0:
            return
        following, first, count = -1, first_child[node], child_count[node]
        for i in range(count):
            chances[i] = 0.0
            for feature in features[first + i]:
                chances[i] += weights[feature]
        scale = to_chances(chances, count)
        for i in range(count):
            child = first + i
            right = tokens[child] == token
            error = (1.0 if right else 0.0) - scale * chances[i]
            for feature in features[child]:
                squares[feature] += error * error
                weights[feature] += LEARNING_RATE * error / np.sqrt(squares[feature])
            if right:
                following = child
        node = following
