"""Step results → what drafters observe."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import Any, Protocol

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.decode_plan import DecodePlan
from lookfar.core.jit import jit
from lookfar.core.plan import NUM_PENDING, RequestPlan, StepPlan
from lookfar.core.tree import ROOT
from lookfar.drafters.base import (
    BatchDrafter,
    BatchOutcome,
    Drafter,
    HiddenRows,
    Outcome,
    Predictions,
    wants_hidden,
)
from lookfar.speculation.candidates import BEFORE, EARLIER, PLACE
from lookfar.speculation.interface import SpeculatedRequest, Walks
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
    def hidden(self) -> Callable[[int, Ints], Any] | None: ...
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
        self, requests: Seq[SpeculatedRequest], plan: StepPlan, walks: Walks[Any], result: StepChoices
    ) -> None:
        self.requests, self.plan, self.walks, self.result = requests, plan, walks, result

    def show(self, places: list[int], drafting: DraftingBatch, ended: bool, ends: Int32s | None) -> None:
        """Show the step to the drafters of some requests. An error of a drafter fails its request.

        `ended` says whether a request of the step has ended; `ends` are what the texts of the requests that drafted
        together ended with before it (`RootArrays.about`).
        """
        by_class: dict[type[BatchDrafter], list[int]] = {}
        known: set[int] = set()
        if not drafting.alone and drafting.requests == self.requests and set(drafting.places) <= set(places):
            known.update(drafting.places)
            for batch, shown in drafting.observers:
                about = self._of_drafted(ends) if shown == drafting.places else None
                batch.observe(self.of_batch(shown, about))
            places = [place for place in places if place not in known or (ended and self.requests[place].is_finished)]
        for place in places:
            request = self.requests[place]
            if request.speculation.other_drafters:
                try:
                    self._show_alone(place)
                except BaseException as error:  # a drafter of another package
                    request.fail(error)
                    continue
            for kind in request.speculation.batch_drafters:
                left = place not in known if kind.wants_steps else request.is_finished
                if left:
                    by_class.setdefault(kind, []).append(place)
        for kind, shown in by_class.items():
            drafting.drafters_of(kind, self.requests, shown).observe(self.of_batch(shown))

    def show_hidden(self, places: Seq[int]) -> None:
        """Show a step that no other drafter observes to those that draft from hidden states."""
        for place in places:
            request = self.requests[place]
            try:
                outcome = self._of_request(place)
                for drafter in request.speculation.hidden_drafters:
                    drafter.observe(request.ids, outcome)
            except BaseException as error:  # a drafter of another package
                request.fail(error)

    def _of_drafted(self, ends: Int32s | None) -> Ints | None:
        """Return `BatchOutcome.about` for the requests that drafted; None if it has to be put together one by one."""
        if ends is None or self.walks.last is None or not isinstance(self.plan, DecodePlan):
            return None
        if any(request.source_length for request in self.requests):
            return None
        about: Ints = describe_decoding(ends, self.result.starts, self.plan.flat.about, self.walks.last)
        if prefilled := self.plan.prefilled:  # other tokens come before their first rows
            rows = {place: row for row, place in enumerate(ends[:, PLACE].tolist())}
            own = [place for place in prefilled if place in rows]
            if own:
                about[[rows[place] for place in own]] = self._describe(own)
        return about

    def of_batch(self, places: Seq[int], about: Ints | None = None) -> BatchOutcome:
        """Return the outcome for some requests together; `about` them, if it is known already."""
        requests = [self.requests[place] for place in places]
        texts, finished = [request.ids for request in requests], [request.is_finished for request in requests]
        if about is None:
            about = self._describe(places)
        return BatchOutcome(texts, finished, self.plan.flat, about, self.result.top_ids, self.result.top_logits)

    def _describe(self, places: Seq[int]) -> Ints:
        """Return `BatchOutcome.about` for some requests."""
        requests, walks = [self.requests[place] for place in places], [self.walks[place] for place in places]
        all_starts, pending = self.result.starts.tolist(), self.plan.num_pending
        starts = [all_starts[place] for place in places]
        reached = [walk.nodes[-1] if walk is not None and walk.nodes else ROOT for walk in walks]
        last = [start + pending[place] + node for place, start, node in zip(places, starts, reached, strict=True)]
        emitted = [walk.tokens[-1] if walk is not None else -1 for walk in walks]
        # The step is not committed yet, so `num_cached` is where its rows begin.
        cached = [(request.ids, request.source_length, request.num_cached) for request in requests]
        before = [ids[source + count - 1] if count else -1 for ids, source, count in cached]
        earlier = [ids[source + count - 2] if count > 1 else -1 for ids, source, count in cached]
        about: Ints = np.array([places, starts, last, emitted, before, earlier], np.int64).T.copy()
        return about

    def _show_alone(self, place: int) -> None:
        """Show the step to drafters that draft for one request; a prefill chunk only if they want something of it."""
        request, rows = self.requests[place], self.plan.requests[place]
        outcome, start = self._of_request(place), int(self.result.starts[place])
        for i, drafter, _ in request.speculation.other_drafters:
            if rows.complete or drafter.wants_predictions or wants_hidden(drafter):
                outcome.window_choices = NO_CHOICES
                if rows.windows and len(rows.windows[i]):
                    outcome.window_choices = self.result.choices[start : start + len(rows)][rows.window_rows(i)]
                drafter.observe(request.ids, outcome)

    def _of_request(self, place: int) -> Outcome:
        """Return the outcome for one request, without the choices of window rows."""
        request, rows, walk = self.requests[place], self.plan.requests[place], self.walks[place]
        start, speculation = int(self.result.starts[place]), request.speculation
        tokens, nodes = (walk.tokens, walk.nodes) if walk is not None else ([], [])
        return Outcome(
            emitted=tokens,
            tree=rows.tree,
            choices=self.result.choices[start + rows.last_row : start + rows.node_row(len(rows.tree))],
            window_choices=NO_CHOICES,
            predictions=self._predictions(place) if speculation.wants_predictions else None,
            last=max(rows.predict, 1) - 1 + (nodes[-1] + 1 if nodes else 0),
            finished=request.is_finished,
            hidden=self._hidden(place, nodes) if speculation.hidden_drafters else None,
        )

    def _hidden(self, place: int, accepted: Seq[int]) -> HiddenRows | None:
        """Return the hidden states of a request's pending tokens and of the nodes that were accepted."""
        if self.result.hidden is None:
            return None
        pending = self.plan.requests[place].pending
        rows = np.append(np.arange(len(pending)), np.array(accepted, np.int64) + len(pending))
        return HiddenRows(self.plan.requests[place].num_cached, rows, partial(self.result.hidden, place))

    def _predictions(self, place: int) -> Predictions | None:
        """Return the most likely next tokens after a request's rows, window rows excepted."""
        rows, result = self.plan.requests[place], self.result
        first = len(rows.pending) - (max(rows.predict, 1) if rows.complete else rows.predict)
        last = rows.node_row(len(rows.tree))
        if result.top_ids is None or result.top_logits is None or first == last:
            return None
        request = self.requests[place]
        before = request.ids[request.source_length + rows.num_cached - 1] if rows.num_cached else -1
        tokens, previous = tokens_and_predecessors(rows.pending, rows.tree.tokens, rows.tree.parents, before)
        start = int(result.starts[place])
        at = slice(start + first, start + last)
        return Predictions(previous[first:], tokens[first:], result.top_ids[at], result.top_logits[at])


@jit
def describe_decoding(ends, starts, plan, last):  # type: ignore[no-untyped-def]
    """Return `BatchOutcome.about` for requests that fed their last token and a tree."""
    about = np.empty((len(ends), 6), np.int64)
    for i in range(len(ends)):
        place = ends[i, PLACE]
        about[i, 0], about[i, 1] = place, starts[place]
        about[i, 2], about[i, 3] = starts[place] + plan[place, NUM_PENDING] + last[0, place], last[1, place]
        about[i, 4], about[i, 5] = ends[i, BEFORE], ends[i, EARLIER]
    return about


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
