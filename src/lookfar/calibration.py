"""How likely a guess is accepted, learned from every step: the log-odds of each kind of evidence, added up.

A candidate token comes with evidence: how deep it lies, what each source of drafts says for or against it, where it
stands among the tokens the model predicted after this token or pair before, and among the runners-up of the root; when
sampling, also how much the noise at its place favours it. Each kind of evidence is a *feature*, each feature has a
weight, and the sum of the weights is the log-odds of acceptance. The next tokens of the text say of every candidate at
every accepted place whether it was right, whether it was fed to the model or not, so nothing has to be fed just to
learn.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.arrays import Floats
from lookfar.jit import jit

# Places of the features in the one vector of weights. Feature 0 of a group means "says nothing".
DEPTH, DEPTHS = 0, 12
RUNNER, RUNNERS = DEPTH + DEPTHS, 10  # absent, then by rank
TABLES = RUNNER + RUNNERS
LEVELS = 8  # levels of a remembered probability, the highest first
TABLE = 1 + 2 * LEVELS  # absent; predicted with this level of probability; others predicted, the best with this level
TABLE_COUNT = 2  # after the last token, after the last pair
LUCK = TABLES + TABLE_COUNT * TABLE
LUCK_LEVELS = 8  # of the noise that a token meets at its place, the luckiest first
LUCKS = 1 + 2 * LUCK_LEVELS  # unknown; of a token that no table predicts; of one whose place in the tables counts it in
DRAFTS = LUCK + LUCKS
GRADES = 16  # how good a match behind a draft is: a drafter's own scale
SHARES = 3  # of the drafts with the best match that support the token: few, half, most
AGAINST = 1  # other tokens are drafted: by the grade of the best of those drafts
FOR = AGAINST + GRADES
SOURCE = FOR + GRADES * SHARES * 2  # for: grade, share, and whether it is the best grade here

# Bounds of the levels of a remembered probability.
LEVEL_BOUNDS = np.array([0.97, 0.88, 0.7, 0.5, 0.3, 0.15, 0.05], dtype=np.float32)
# Bounds of the levels of noise, and the log-odds that each is worth: minus the logarithm of the noise.
LUCK_BOUNDS = np.array([0.05, 0.15, 0.35, 0.7, 1.2, 2.0, 3.0], dtype=np.float32)
LUCK_WORTH = np.array([3.0, 2.2, 1.4, 0.7, 0.1, -0.4, -0.9, -1.4], dtype=np.float32)

BASE = -2.0  # the log-odds of a token for which nothing speaks
RATE = 0.25
STEADINESS = 1.0  # how many doubtful observations the first weights are worth


class Calibration:
    """The weights for one set of sources."""

    def __init__(self, sources: Seq[str]) -> None:
        self.sources = tuple(sources)
        self.weights = first_weights(len(self.sources))
        self.squares: Floats = np.full(len(self.weights), STEADINESS, dtype=np.float32)


def first_weights(source_count: int) -> Floats:
    """What to believe before anything was seen: round numbers near what the demo model taught."""
    weights = np.zeros(DRAFTS + source_count * SOURCE, dtype=np.float32)
    weights[DEPTH : DEPTH + DEPTHS] = BASE
    weights[RUNNER + 1 : RUNNER + RUNNERS] = np.linspace(0.9, -0.2, RUNNERS - 1)
    for table, absent, best, last in ((0, -0.8, 1.6, -0.9), (1, -0.1, 2.8, -0.8)):
        start = TABLES + table * TABLE
        weights[start] = absent
        weights[start + 1 : start + 1 + LEVELS] = np.linspace(best, last, LEVELS)
        weights[start + 1 + LEVELS : start + TABLE] = np.linspace(-1.4, -0.2, LEVELS)
    weights[LUCK + 1 : LUCK + 1 + LUCK_LEVELS] = LUCK_WORTH
    for source in range(source_count):
        start = DRAFTS + source * SOURCE
        weights[start + AGAINST : start + FOR] = np.linspace(0.0, -2.5, GRADES)
        for grade in range(GRADES):
            for share in range(SHARES):
                for best in range(2):
                    place = start + FOR + (grade * SHARES + share) * 2 + best
                    weights[place] = 0.5 + 0.35 * grade + 0.7 * (share - 1) + 0.5 * (best - 1)
    return weights


@jit
def learn_along(weights, squares, features, tokens, first_child, child_count, place, emitted):  # type: ignore[no-untyped-def]
    """Learn from the candidates after `place` and after each accepted one: which of them was what came next?

    One step of logistic regression for each candidate, each weight with a rate of its own (Adagrad).
    """
    for token in emitted:
        if place < 0 or first_child[place] < 0:
            return
        following = -1
        for candidate in range(first_child[place], first_child[place] + child_count[place]):
            total = np.float32(0.0)
            for feature in features[candidate]:
                total += weights[feature]
            right = tokens[candidate] == token
            error = (1.0 if right else 0.0) - 1.0 / (1.0 + np.exp(-total))
            for feature in features[candidate]:
                squares[feature] += error * error
                weights[feature] += RATE * error / np.sqrt(squares[feature])
            if right:
                following = candidate
        place = following
