"""Multi-token prediction: the layers that the checkpoint itself holds for it draft from the model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import log
from time import perf_counter
from typing import ClassVar

import numpy as np
import torch

from lookfar.drafters.base import MAX_SCORE, DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.errors import ConfigError
from lookfar.models.binding import BoundModel
from lookfar.models.mtp_heads import MtpHeads, check_heads

CHUNK = 256  # hidden states of a prompt that are kept until the layers take them
# The initial weights of the acceptance model give a match score s log-odds of about -1.7 + 0.35 s.
NO_SCORE, SCORE_STEP = -1.7, 0.35
MIN_CHANCE = 1e-6
LEARNING_RATE = 0.05  # of a step that drafted, for what drafting is worth
RECOVERY_RATE = 0.0002  # of a step that did not: it is tried again after a while


@dataclass(frozen=True)
class Mtp(Strategy):
    """The checkpoint's own prediction layers draft `length` tokens, and `branches` alternatives for each of them.

    Each layer drafts one token, and the last one goes on from its own states. With `if_pays` they only draft while the
    tokens that nobody else drafts are worth the time, and a checkpoint without layers is no error.
    """

    name: ClassVar[str] = "mtp"
    length: int = 3
    branches: int = 3
    if_pays: bool = False

    def __post_init__(self) -> None:
        self._check_at_least(length=1, branches=1)

    def check(self, model: BoundModel) -> None:
        if not self.if_pays and not model.has_heads:
            check_heads(model.model)

    def create(self, context: DraftContext) -> list[Drafter]:
        assert context.model is not None
        try:
            heads = context.model.heads
        except ConfigError:
            if self.if_pays:
                return []
            raise
        value = context.sources.shared((Mtp, self), lambda: DraftingValue(self.length))
        return [MtpDrafter(self, heads, value)]

    @property
    def max_rows(self) -> int:
        return self.length * self.branches


class MtpDrafter:
    """Keeps the layers' cache of one text, and the hidden states that they have not taken yet.

    The states of tokens that were in the KV cache before the request began are unknown: the layers do without them.
    """

    name = Mtp.name
    wants_predictions = False
    wants_hidden = True

    def __init__(self, settings: Mtp, heads: MtpHeads, value: DraftingValue) -> None:
        self.settings = settings
        self.heads = heads
        self.value = value
        self.cache = heads.new_cache()
        self.num_layers = min(len(heads), settings.length)
        self.start = 0  # the position of the first state that is kept
        self.kept: torch.Tensor | None = None  # [states, hidden]
        self.latest: tuple[int, Proposal] = -1, Proposal()  # the last drafts, and the length of the text before them
        self.spent = 0.0  # seconds of the present step
        self.drafted = False  # in the present step
        self.observed: float | None = None  # when the last step ended

    @property
    def end(self) -> int:
        """The position after the last known state."""
        return self.start + (len(self.kept) if self.kept is not None else 0)

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        if self.latest[0] == len(ids):  # the step failed, and is tried again
            return self.latest[1]
        # The last token has no state yet: its embedding goes with the state of the token before it.
        if self.kept is None or self.end != len(ids) - 1 or (self.settings.if_pays and not self.value.pays):
            return Proposal()
        started = perf_counter()
        drafted = self._draft(ids, min(limit, self.settings.length))
        self.drafted = True
        self.spent += perf_counter() - started
        self.latest = len(ids), as_proposal(drafted)
        return self.latest[1]

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        if outcome.hidden is not None and not outcome.finished:
            started = perf_counter()
            self._keep(outcome)
            if self.kept is not None and len(self.kept) >= CHUNK:
                self._take(ids, len(self.kept) - self.num_layers + 1)
            self.spent += perf_counter() - started
        self._learn_value(outcome)

    def _keep(self, outcome: Outcome) -> None:
        """Keep the states that are new; tokens that are fed again bring theirs again."""
        hidden = outcome.hidden
        assert hidden is not None
        if hidden.end <= self.end:
            return
        if hidden.start > self.end or self.kept is None:  # nothing is known of the tokens between
            self.start, self.kept = max(hidden.start, self.end), None
        new = hidden.since(self.end)
        self.kept = new if self.kept is None else torch.cat([self.kept, new])

    def _draft(self, ids: Seq[int], length: int) -> list[tuple[list[int], list[float]]]:
        """Return the most likely tokens of each place and their probabilities.

        Every layer but the first also takes tokens that the layers before it have drafted, so the last states are kept
        to be taken again.
        """
        assert self.kept is not None
        found: list[tuple[list[int], list[float]]] = []
        states, count = self.kept, len(self.kept)
        position, tokens = self.start + 1, list(ids[self.start + 1 :])
        used = min(self.num_layers, length)
        for depth in range(length):
            layer = min(depth, used - 1)
            if depth > layer:  # the last layer goes on from its own state
                states, position, tokens = states[-1:], position + len(tokens) - 1, tokens[-1:]
            states = self.heads.run(layer, states, tokens, position, self.cache)
            found.append(self.heads.predict(states[-1], self.settings.branches))
            tokens, position = [*tokens[1:], found[-1][0][0]], position + 1
        again = min(used - 1, count)
        for layer, of_layer in enumerate(self.cache.layers[:used]):
            of_layer.crop(-again - (length - used if layer == used - 1 else 0))
        self.start, self.kept = self.start + count - again, self.kept[count - again :]
        return found

    def _take(self, ids: Seq[int], count: int) -> None:
        """Let the layers take the first states of a prompt, whose tokens are all known."""
        assert self.kept is not None
        states = self.kept[:count]
        for layer in range(self.num_layers):
            first = self.start + 1 + layer
            states = self.heads.run(layer, states, ids[first : first + count], first, self.cache)
            self.cache.layers[layer].crop(0)
        self.start, self.kept = self.start + count, self.kept[count:]

    def _learn_value(self, outcome: Outcome) -> None:
        now, before = perf_counter(), self.observed
        if outcome.emitted and before is not None:
            accepted = outcome.tree.path_of(outcome.emitted) if self.drafted else []
            alone = sum(
                bool(outcome.tree.num_sources[node] == 1) and outcome.tree.source(node) == self.name
                for node in accepted
            )
            self.value.learn(len(outcome.emitted), now, alone if self.drafted else None, self.spent)
        self.value.seen, self.observed = now, now
        self.spent, self.drafted = 0.0, False


class DraftingValue:
    """What drafting with the layers is worth, learned from all requests of a model.

    A token that nobody else drafted saves the time of a token; drafting costs the time that it takes. Both are averages
    over steps that draft. They start at their best, and go back to it while nothing is drafted, so that it is tried
    again.
    """

    def __init__(self, length: int) -> None:
        self.most = length
        self.gained = float(length)  # tokens a step
        self.spent = 0.0  # seconds a step
        self.seconds, self.tokens = 0.0, 0.0  # of all steps, older ones counting less
        self.seen = perf_counter()  # when a step of any request was seen last

    @property
    def pays(self) -> bool:
        """Whether the layers should draft."""
        return not self.tokens or self.gained * self.seconds / self.tokens >= self.spent

    def learn(self, emitted: int, now: float, gained: int | None, spent: float) -> None:
        """Learn from a step of one request: `gained` tokens that nobody else drafted; None if it did not draft.

        Requests of one step are seen at nearly the same time, so their tokens share its seconds.
        """
        self.seconds += now - self.seen - spent
        self.tokens += emitted
        self.seconds, self.tokens = (1 - LEARNING_RATE) * self.seconds, (1 - LEARNING_RATE) * self.tokens
        rate = LEARNING_RATE if gained is not None else RECOVERY_RATE
        self.gained += rate * ((gained if gained is not None else self.most) - self.gained)
        self.spent += rate * ((spent if gained is not None else 0.0) - self.spent)


def as_proposal(drafted: Seq[tuple[Seq[int], Seq[float]]]) -> Proposal:
    """Return the most likely path, and the alternatives to each of its tokens, with scores by their probability.

    Every beginning of the path is a draft of its own, because a draft has one score.
    """
    paths: list[list[int]] = []
    chances: list[float] = []
    path: list[int] = []
    likely = 1.0
    for tokens, probabilities in drafted:
        paths += [[*path, token] for token in tokens]
        chances += [likely * probability for probability in probabilities]
        path.append(tokens[0])
        likely *= probabilities[0]
    proposal = Proposal.of(paths)
    proposal.scores = np.array([score_of(chance) for chance in chances], np.int32)
    proposal.weights = np.maximum(chances, MIN_CHANCE).astype(np.float32)
    return proposal


def score_of(chance: float) -> int:
    """Return the match score of a probability."""
    chance = min(max(chance, MIN_CHANCE), 1 - MIN_CHANCE)
    return min(max(round((log(chance / (1 - chance)) - NO_SCORE) / SCORE_STEP), 0), MAX_SCORE)
