"""Step results → what drafters observe."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.drafters.base import BatchDrafter, BatchOutcome, Drafter, Outcome, Predictions
from lookfar.speculation.interface import SpeculatedRequest, Walk
from lookfar.speculation.proposals import DraftingBatch

NO_CHOICES: Ints = np.zeros(0, np.int64)


class StepChoices(Protocol):
    """The part of a step's result that drafters observe (`StepResult`)."""

    @property
    def starts(self) -> Ints: ...
    @property
    def choices(self) -> Ints: ...
    @property
    def top_ids(self) -> Int32s | None: ...
    @property
    def top_logits(self) -> Floats | None: ...
    @property
    def num_rows(self) -> int:
        """Rows that were computed, padding included."""

    @property
    def seconds(self) -> float: ...
    @property
    def is_warm(self) -> bool: ...


class StepOutcomes:
    """The outcome of a step for the drafters of all its requests."""

    def __init__(
        self, requests: Seq[SpeculatedRequest], plan: StepPlan, walks: Seq[Walk | None], result: StepChoices
    ) -> None:
        self.requests, self.plan, self.walks, self.result = requests, plan, walks, result

    def show(self, places: Seq[int], drafting: DraftingBatch) -> None:
        """Show the step to the drafters of some requests. An error of a drafter fails its request."""
        by_class: dict[type[BatchDrafter], list[int]] = {}
        for place in places:
            request = self.requests[place]
            if request.speculation.other_drafters:
                try:
                    self._show_alone(place)
                except BaseException as error:  # a drafter of another package
                    request.fail(error)
                    continue
            for kind in request.speculation.batch_drafters:
                if kind.wants_steps or request.is_finished:
                    by_class.setdefault(kind, []).append(place)
        for kind, shown in by_class.items():
            drafting.drafters_of(kind, self.requests, shown).observe(self.of_batch(shown))

    def of_batch(self, places: Seq[int]) -> BatchOutcome:
        """Return the outcome for some requests together."""
        about, texts, finished = [], [], []
        requests, plans, walks, result = self.requests, self.plan.requests, self.walks, self.result
        starts = result.starts.tolist()
        for place in places:
            request, rows, walk = requests[place], plans[place], walks[place]
            start, ids = starts[place], request.ids
            last, emitted = start + len(rows.pending) - 1, -1
            if walk is not None:
                last, emitted = (last + 1 + walk.nodes[-1] if walk.nodes else last), walk.tokens[-1]
            about.append((place, start, last, emitted, _token_before(request, rows)))
            texts.append(ids)
            finished.append(request.is_finished)
        of_requests = np.array(about, np.int64)
        return BatchOutcome(texts, finished, self.plan.flat, of_requests, result.top_ids, result.top_logits)

    def _show_alone(self, place: int) -> None:
        """Show the step to drafters that draft for one request; a prefill chunk only if they want predictions."""
        request, rows, walk = self.requests[place], self.plan.requests[place], self.walks[place]
        start, speculation = int(self.result.starts[place]), request.speculation
        choices = self.result.choices[start : start + len(rows)]
        tokens, nodes = (walk.tokens, walk.nodes) if walk is not None else ([], [])
        outcome = Outcome(
            emitted=tokens,
            tree=rows.tree,
            choices=choices[rows.last_row : rows.node_row(len(rows.tree))],
            window_choices=NO_CHOICES,
            predictions=self._predictions(place) if speculation.wants_predictions else None,
            last=max(rows.predict, 1) - 1 + (nodes[-1] + 1 if nodes else 0),
            finished=request.is_finished,
        )
        for i, drafter, _ in speculation.other_drafters:
            if rows.complete or drafter.wants_predictions:
                outcome.window_choices = NO_CHOICES
                if rows.windows and len(rows.windows[i]):
                    outcome.window_choices = choices[rows.window_rows(i)]
                drafter.observe(request.ids, outcome)

    def _predictions(self, place: int) -> Predictions | None:
        """Return the most likely next tokens after a request's rows, window rows excepted."""
        rows, result = self.plan.requests[place], self.result
        first = len(rows.pending) - (max(rows.predict, 1) if rows.complete else rows.predict)
        last = rows.node_row(len(rows.tree))
        if result.top_ids is None or result.top_logits is None or first == last:
            return None
        before = _token_before(self.requests[place], rows)
        tokens, previous = tokens_and_predecessors(rows.pending, rows.tree.tokens, rows.tree.parents, before)
        start = int(result.starts[place])
        at = slice(start + first, start + last)
        return Predictions(previous[first:], tokens[first:], result.top_ids[at], result.top_logits[at])


def _token_before(request: SpeculatedRequest, rows: RequestPlan) -> int:
    """Return the token before the first row of a step; -1 for none."""
    return request.ids[request.source_length + rows.num_cached - 1] if rows.num_cached else -1


@jit
def tokens_and_predecessors(pending, tokens, parents, before):  # type: ignore[no-untyped-def]
    """Return the tokens of the pending rows and the tree, and the token before each; `before` precedes the first."""
    fed = np.empty(len(pending) + len(tokens), np.int32)
    previous = np.empty(len(fed), np.int32)
    for row in range(len(pending)):
        fed[row] = pending[row]
        previous[row] = pending[row - 1] if row else before
    for node in range(len(tokens)):
        fed[len(pending) + node] = tokens[node]
        previous[len(pending) + node] = fed[len(pending) + parents[node]]
    return fed, previous


def window_gain(drafters: Seq[Drafter], rows: RequestPlan, accepted: Seq[int]) -> int | None:
    """Return how many accepted tokens only a drafter with a window proposed; None if no window was fed."""
    names = {drafters[i].name for i, window in enumerate(rows.windows) if len(window)}
    if not names:
        return None
    return sum(bool(rows.tree.num_sources[node] == 1) and rows.tree.source(node) in names for node in accepted)
