"""Step results → what drafters observe."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import RequestPlan, StepPlan, tokens_and_predecessors
from lookfar.drafters.base import Drafter, Outcome, Predictions
from lookfar.speculation.interface import SpeculatedRequest, Walk

NO_CHOICES: Ints = np.zeros(0, np.int64)


class StepChoices(Protocol):
    """The part of a step's result that drafters observe, for each request by row."""

    @property
    def logit_rows(self) -> Ints: ...
    @property
    def choices(self) -> Seq[Ints]: ...
    @property
    def top_ids(self) -> Seq[Int32s] | None: ...
    @property
    def top_logits(self) -> Seq[Floats] | None: ...
    @property
    def num_rows(self) -> int:
        """Rows that were computed, padding included."""

    @property
    def seconds(self) -> float: ...
    @property
    def is_warm(self) -> bool: ...


def notify_drafters(
    place: int, request: SpeculatedRequest, plan: StepPlan, walk: Walk | None, result: StepChoices
) -> None:
    """Show a step to the drafters of a request; a prefill chunk only to those that want predictions."""
    rows, choices, speculation = plan.requests[place], result.choices[place], request.speculation
    tokens, nodes = (walk.tokens, walk.nodes) if walk is not None else ([], [])
    outcome = Outcome(
        emitted=tokens,
        tree=rows.tree,
        choices=choices[rows.last_row : rows.node_row(len(rows.tree))],
        window_choices=NO_CHOICES,
        predictions=predictions_of(place, request, plan, result) if speculation.wants_predictions else None,
        last=max(rows.predict, 1) - 1 + (nodes[-1] + 1 if nodes else 0),
        finished=request.is_finished,
    )
    for i, drafter in enumerate(speculation.drafters):
        if rows.complete or drafter.wants_predictions:
            outcome.window_choices = NO_CHOICES
            if rows.windows and len(rows.windows[i]):
                outcome.window_choices = choices[rows.window_rows(i)]
            drafter.observe(request.ids, outcome)


def predictions_of(place: int, request: SpeculatedRequest, plan: StepPlan, result: StepChoices) -> Predictions | None:
    """Return the most likely next tokens after a request's rows, window rows excepted."""
    rows = plan.requests[place]
    first = len(rows.pending) - (max(rows.predict, 1) if rows.complete else rows.predict)
    last = rows.node_row(len(rows.tree))
    if result.top_ids is None or result.top_logits is None or first == last:
        return None
    before = request.ids[rows.num_cached - 1] if rows.num_cached else -1
    tokens, previous = tokens_and_predecessors(rows.pending, rows.tree.tokens, rows.tree.parents, before)
    all_rows = len(result.logit_rows) == plan.width
    at: Any = slice(first, last) if all_rows else np.searchsorted(result.logit_rows, np.arange(first, last))
    return Predictions(previous[first:], tokens[first:], result.top_ids[place][at], result.top_logits[place][at])


def window_gain(drafters: Seq[Drafter], rows: RequestPlan, accepted: Seq[int]) -> int | None:
    """Return how many accepted tokens only a drafter with a window proposed; None if no window was fed."""
    names = {drafters[i].name for i, window in enumerate(rows.windows) if len(window)}
    if not names:
        return None
    return sum(bool(rows.tree.num_sources[node] == 1) and rows.tree.source(node) in names for node in accepted)
