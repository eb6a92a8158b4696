"""The speculator: plans the rows of a step, and learns from its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lookfar.core.decode_plan import DecodePlan, LastTokens
from lookfar.core.host_team import wake_helpers
from lookfar.core.plan import RequestPlan, RunnerLimits, StepPlan
from lookfar.retrieval.recycle_table import SAMPLED_TOP_K, TOP_K
from lookfar.speculation.batch_facts import BatchFacts
from lookfar.speculation.controller import SpeculationController
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.cost_file import Experience, KnownCosts, nearest_experience
from lookfar.speculation.drafting import Drafting, Drafts
from lookfar.speculation.host_cost import HostCost
from lookfar.speculation.interface import Batch, SpeculatedRequest, Walks
from lookfar.speculation.outcomes import StepChoices, StepOutcomes, window_gain
from lookfar.speculation.row_budget import Prices, StepRows

LIKELY = 0.5  # how often the first draft token of a request is right, at best


@dataclass
class StepRecord:
    """A step, until the speculator has learned from it."""

    batch: Batch
    facts: BatchFacts
    speculates: bool
    prefills: bool
    controller: SpeculationController | None
    drafts: Drafts | None = None
    plan: StepPlan | None = None
    walks: Walks[Any] = field(default_factory=Walks)
    result: StepChoices | None = None  # set when the step is done
    seconds: float = 0.0  # from its beginning to that of the next one

    @property
    def kind(self) -> str:
        """What its times are learned for."""
        return self.facts.kind

    @property
    def weighted_tokens(self) -> float:
        """The tokens of the step, by the urgency of their requests: the mean of those that were expected and emitted.

        What comes differs from step to step, and what was expected is right on average: their mean tells sooner what
        speculation is worth.
        """
        emitted = [len(walk.tokens) if walk is not None else 0 for walk in self.walks]
        if self.drafts is None:
            return float(sum(emitted))
        weights = zip(self.drafts.urgency.tolist(), self.drafts.members, strict=True)
        extra: float = sum(weight * max(emitted[member.place] - 1, 0) for weight, member in weights)
        expected = self.drafts.expected
        return sum(map(bool, emitted)) + (extra if expected is None else (extra + expected) / 2)

    def observers(self) -> tuple[list[int], list[int]]:
        """Return the requests whose drafters observe the step, and those where only drafters from hidden states do."""
        assert self.plan is not None
        places, unseen = [], []
        for place, request in enumerate(self.batch.requests):
            if request.error is not None:
                continue
            prefilled = self.prefills and (self.plan.num_pending[place] > 1 or not self.plan.complete[place])
            if (self.speculates or request.is_finished or prefilled) and request.speculation.drafters:
                places.append(place)
            elif request.speculation.hidden_drafters:
                unseen.append(place)
        return places, unseen


class Speculator:
    """Plans steps: proposals, one draft tree for each request, the row budget, and speculation on or off."""

    def __init__(self, costs: CostCurve | None = None) -> None:
        self.costs = costs  # needed for automatic budgets
        self.controllers: dict[str, SpeculationController] = {}  # by the kind of step
        self._remembered: Mapping[str, Experience] = {}  # of earlier processes
        self._step: StepRecord | None = None  # the one that was planned last
        self._unlearned: list[StepRecord] = []
        self._known_prices: dict[str, Prices] = {}  # by the kind of step
        self._drafting = Drafting([], [])  # of the last step that speculated
        self._facts = BatchFacts([])  # of the last step

    def use_costs(self, known: KnownCosts) -> None:
        """Use what is known of this model on this machine."""
        self.costs, self._remembered = known.curve, known.experience

    @property
    def experience(self) -> dict[str, Experience]:
        """What was learned about speculation in steps of each kind, now and earlier."""
        now = {
            kind: Experience(one.speculating, one.host.fixed, one.host.per_row)
            for kind, one in self.controllers.items()
        }
        return {**self._remembered, **now}

    def plan(self, batch: Batch, limits: RunnerLimits) -> StepPlan:
        """Plan the next forward pass of a batch."""
        if self._step is not None:  # outputs were delivered until now
            self._step.seconds = batch.started - self._step.batch.started
        self._step = step = self._decide(batch)
        if limits.recurrent and not step.prefills and not step.speculates:
            batch.catch_up()
        requests, facts = batch.requests, self._facts_of(batch.requests)
        prefills: dict[int, RequestPlan] = {}  # of requests that feed more than their last tokens
        lengths = [1] * len(requests)
        teaches = step.speculates or (step.prefills and len(requests) == 1)  # one request may speculate soon
        if step.prefills or max(batch.chunks) > 1:  # outside of prefills, a chunk is all that is pending
            # Captured steps compute the logits of all rows. Elsewhere those of prompt rows take time from every request
            sharing = 1 if limits.captured else len(requests)
            for place, (request, chunk) in enumerate(zip(requests, batch.chunks, strict=True)):
                if request.num_pending > 1 or not request.num_cached:
                    prefills[place] = rows = plan_pending(request, chunk, sharing if teaches else 0)
                    lengths[place] = len(rows)
        drafts = step.speculates and not (step.prefills and limits.recurrent)  # or a rejected draft repeats the chunk
        if drafts and facts.drafting:
            incomplete = {place for place, rows in prefills.items() if not rows.complete}
            places, num_prefilling = facts.drafting, len(incomplete)
            if incomplete:
                places = [place for place in places if place not in incomplete]
            fed = StepRows(lengths, limits, num_prefilling, batch.others_wait)
            step.drafts = self._draft(requests, places, fed, self._prices(step))
        wanted = teaches and facts.wants_predictions
        top_k = (SAMPLED_TOP_K if facts.samples else TOP_K) if wanted else 0
        step.plan = make_plan(facts, prefills, step.drafts, top_k)
        step.plan.prefills = facts.has_prompts()
        step.plan.hidden = facts.wants_hidden
        return step.plan

    def _facts_of(self, requests: Seq[SpeculatedRequest]) -> BatchFacts:
        """Return the facts about the requests of a step."""
        if not self._facts.are_of(requests):
            self._facts = BatchFacts(requests)
        return self._facts

    def _prices(self, step: StepRecord) -> Prices:
        """Return what the rows of a step cost."""
        if step.controller is None:
            return Prices(self.costs, HostCost(), step.kind)
        known, host = self._known_prices.get(step.kind), step.controller.host
        if known is None or known.costs is not self.costs or known.host is not host:
            known = self._known_prices[step.kind] = Prices(self.costs, host, step.kind)
        return known

    def _draft(
        self, requests: Seq[SpeculatedRequest], places: list[int], step: StepRows, prices: Prices
    ) -> Drafts | None:
        """Draft for some requests of a step, as far as they may emit more than one token."""
        # The bonus token is always emitted, so a deeper draft could never be accepted.
        depths = [requests[place].remaining - 1 for place in places]
        if min(depths, default=0) <= 0:
            places = [place for place, depth in zip(places, depths, strict=True) if depth > 0]
            depths = [depth for depth in depths if depth > 0]
        if not places:
            return None
        if not self._drafting.is_of(requests, places):
            self._drafting = Drafting(requests, places)
        return self._drafting.draft(np.array(depths, np.int32), step, prices)

    def _decide(self, batch: Batch) -> StepRecord:
        """Decide whether a step speculates. The controller is asked where all budgets are automatic."""
        requests = batch.requests
        facts = self._facts_of(requests)
        if batch.is_first_pass:
            return StepRecord(batch, facts, False, True, None)
        prefills = batch.prefills
        if self.costs is None or not facts.is_automatic:
            return StepRecord(batch, facts, True, prefills, None)
        kind = facts.kind
        if kind not in self.controllers:
            earlier, begins = nearest_experience(self.experience, kind), is_promising(self.costs, facts)
            self.controllers[kind] = SpeculationController(len(requests), earlier, speculates=begins)
        controller = self.controllers[kind]
        if prefills:
            controller.restart()
            return StepRecord(batch, facts, controller.speculating, prefills, controller)
        base_rate = 1 / self.costs.seconds_for(len(requests), kind)
        return StepRecord(batch, facts, controller.decide(base_rate), prefills, controller)

    def observe(self, walks: Walks[Any], result: StepChoices) -> None:
        """Show the outcome of the planned step to the drafters. An error of a drafter fails its request."""
        step = self._step
        assert step is not None
        assert step.plan is not None
        step.walks, step.result = walks, result
        requests = step.batch.requests
        ended = any(request.is_finished for request in requests)
        places, unseen = step.observers() if ended or not step.speculates else (self._facts_of(requests).drafting, [])
        if places or unseen:
            outcomes = StepOutcomes(requests, step.plan, walks, result)
            outcomes.show(places, self._drafting, ended, step.drafts.ends if step.drafts is not None else None)
            outcomes.show_hidden(unseen)
        self._unlearned.append(step)
        for group in step.drafts.groups if ended and step.drafts is not None else ():
            group.count(walks, finished=True)  # the engine reads these counts next

    def learn(self) -> None:
        """Do the learning that the next plan does not need: called while the device works."""
        if self._step is not None and self._step.speculates and self._step.facts.samples:
            for request in self._step.batch.requests:
                if request.sampler.random is not None:
                    request.sampler.random.prefetch()
        unlearned, self._unlearned = self._unlearned, []
        for step in unlearned:
            self._learn_from(step)
            if step.seconds:  # not of the last step before a pause
                self._learn_rate(step)
        if self._step is not None and self._step.drafts is not None and len(self._step.drafts.members) > 1:
            wake_helpers()  # for the next plan

    def settle(self) -> None:
        """Finish learning, and keep nothing of the requests of the last step: called when there is time."""
        self.learn()
        self._step, self._drafting, self._facts = None, Drafting([], []), BatchFacts([])

    def _learn_from(self, step: StepRecord) -> None:
        """Count the draft tokens of a step, teach the acceptance models, and refine the cost curve."""
        assert step.plan is not None
        assert step.result is not None
        for group in step.drafts.groups if step.drafts is not None else ():
            group.count(step.walks, finished=False)
            group.learn(step.walks)
            for member in group.members:
                speculation, walk = member.request.speculation, step.walks[member.place]
                if speculation.uses_window and walk is not None:
                    rows = step.plan.requests[member.place]
                    speculation.state.update_window_value(window_gain(speculation.drafters, rows, walk.nodes))
        if self.costs is not None and not step.prefills and step.result.is_warm:
            self.costs.refine(step.result.num_rows, step.result.seconds, step.kind)

    def _learn_rate(self, step: StepRecord) -> None:
        """Tell the controller about a step, unless it prefilled, failed, or captured a graph."""
        if step.controller is None or step.prefills or step.result is None or not step.result.is_warm:
            return
        assert self.costs is not None
        cost = float(self.costs.table(step.result.num_rows)[step.result.num_rows])
        drafted = step.plan is not None and sum(step.plan.lengths) > sum(step.plan.num_pending)
        # For each request, because steps of one kind differ in their number of requests.
        tokens = step.weighted_tokens / len(step.batch.requests)
        step.controller.learn(step.speculates, tokens, step.seconds, cost, drafted)
        if step.speculates and step.plan is not None:
            step.controller.host.learn(sum(step.plan.lengths), step.batch.host_seconds)


def is_promising(costs: CostCurve, facts: BatchFacts) -> bool:
    """Whether a batch of which nothing is known begins with speculation: if a draft for each request is likely to pay.

    A row of a sampled batch costs more than the curve says, and is guessed right less often.
    """
    requests = len(facts.requests)
    if requests == 1:
        return True
    table = costs.table(2 * requests)
    return not facts.samples and bool((1 + LIKELY) * table[requests] > table[2 * requests])


def make_plan(facts: BatchFacts, prefills: Mapping[int, RequestPlan], drafts: Drafts | None, k: int) -> StepPlan:
    """Return the plan of a step in which all requests without a plan among `prefills` feed their last token."""
    if len(prefills) == len(facts.requests):  # perhaps a first pass, which decides what later plans have in common
        return with_drafts(list(prefills.values()), drafts, k)
    tokens = np.array([request.ids[-1] for request in facts.requests], np.int64)
    cached = np.array([request.num_cached for request in facts.requests], np.int64)
    fed = LastTokens(tokens, cached, prefills)
    if drafts is None:
        return DecodePlan(facts.decoding, fed, None, k)
    if drafts.trees is not None and not drafts.windows:
        return DecodePlan(facts.decoding, fed, drafts.trees, k)
    return with_drafts(list(DecodePlan(facts.decoding, fed).requests), drafts, k)


def with_drafts(rows: list[RequestPlan], drafts: Drafts | None, k: int) -> StepPlan:
    """Return the plan of a step with the rows of its requests, and their drafts."""
    if drafts is None:
        return StepPlan(rows, k)
    drafts.add_to(rows)
    return StepPlan(rows, k, trees=drafts.trees)


def plan_pending(request: SpeculatedRequest, chunk: int, sharing: int) -> RequestPlan:
    """Plan the pending tokens of a request: a chunk of its prompt, or all of them, at the least the last token.

    `sharing` requests share the rows whose predictions drafters get; 0: there are none.
    """
    start = request.first_pending
    pending = np.array(request.ids[start : start + chunk], dtype=np.int64)
    predict = 0
    if request.speculation.wants_predictions and sharing:
        predict = 1
    if predict and request.is_prefilling:
        predict = max(start + len(pending) - max(request.predicted_from(sharing), start), 0)
    return RequestPlan(
        pending,
        request.num_cached,
        request.kv,
        complete=len(pending) == request.num_pending,
        predict=predict,
        embeds=request.embeds,
        sampler=request.sampler if request.sampler.random is not None else None,
        position_offset=request.position_offset,
        source=request.source,
    )
