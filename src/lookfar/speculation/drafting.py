"""Proposals → draft trees: the requests of a step are grouped, their candidates built, and the best ones chosen.

Sources, budgets and tables belong to a request. Requests with the same ones share a build and compete for rows;
requests with other ones do not change theirs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Ints
from lookfar.core.plan import RequestPlan, RunnerLimits
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.interface import SpeculatedRequest
from lookfar.speculation.proposals import RequestProposals, collect, propose
from lookfar.speculation.row_budget import Budget, BudgetKind, Ranking, RowBudget, StepRows, Windows, kind_of
from lookfar.speculation.tree_builder import BuildLimits, Candidates, build_candidates

RECYCLED = "recycle"  # the source of candidates that no drafter drafted
NO_GROUPS: Ints = np.zeros(0, np.int64)
NO_WINDOWS = Windows((), (), ())
KINDS: tuple[BudgetKind, ...] = ("all", "number", "auto")  # budgets in the order in which they take rows


@dataclass
class DraftedGroup:
    """Requests with one table and one acceptance model, and the candidates that were built for them."""

    members: Seq[RequestProposals]
    candidates: Candidates

    def ranking(self) -> Ranking:
        scores = self.candidates.chosen_scores
        return Ranking(scores, self.members[0].acceptance.calibration.apply(scores), self.candidates.owners)

    def set_trees(self, plans: Seq[RequestPlan], count: int) -> None:
        """Give each request the tree of its best candidates; `count` of the whole group."""
        names = (*self.members[0].acceptance.sources, RECYCLED)
        trees = self.candidates.trees(count, names, len(self.members))
        for member, tree in zip(self.members, trees, strict=True):
            plans[member.place].tree = tree


def draft_trees(
    requests: Seq[SpeculatedRequest],
    plans: Seq[RequestPlan],
    limits: RunnerLimits,
    costs: CostCurve | None,
    overhead: float,
) -> list[DraftedGroup]:
    """Add draft trees and windows to the plans of a step. An error of a drafter fails its request."""
    proposed = []
    for place, (request, rows) in enumerate(zip(requests, plans, strict=True)):
        try:
            proposals = propose(place, request, rows)
        except BaseException as error:  # a drafter of another package
            request.fail(error)
            continue
        if proposals is not None:
            proposed.append(proposals)
    if not proposed:
        return []
    step = StepRows(plans, limits)
    budgets = [request.speculation.budget for request in requests]
    max_rows = [request.speculation.max_rows for request in requests]
    groups: list[DraftedGroup] = []
    for kind, members in by_kind(proposed, budgets):
        if groups:
            step.count_rows()
        budget = RowBudget.of(kind, [member.place for member in members], budgets, max_rows)
        drafted = build_groups(members, budget, step)
        choose_rows(drafted, members, budget, step, (costs, overhead))
        groups += drafted
    return groups


def by_kind(proposed: Seq[RequestProposals], budgets: Seq[Budget]) -> list[tuple[BudgetKind, list[RequestProposals]]]:
    """Sort requests by the kind of their budget."""
    members: dict[BudgetKind, list[RequestProposals]] = {}
    for member in proposed:
        members.setdefault(kind_of(budgets[member.place]), []).append(member)
    return sorted(members.items(), key=lambda item: KINDS.index(item[0]))


def build_groups(members: Seq[RequestProposals], budget: RowBudget, step: StepRows) -> list[DraftedGroup]:
    """Build the candidates of requests with one kind of budget."""
    by_source: dict[tuple[int, int], list[RequestProposals]] = {}
    for member in members:
        by_source.setdefault((id(member.table), id(member.acceptance)), []).append(member)
    groups = []
    for group in by_source.values():
        limits = BuildLimits(
            budget.max_nodes(step),
            np.array([budget.max_rows[member.place] for member in group], np.int32),
            budget.min_score,
            group[0].request.speculation.state.sources.vocab_size,
        )
        groups.append(DraftedGroup(group, build_candidates(collect(group, step.limits.depth), limits)))
    return groups


def choose_rows(
    groups: Seq[DraftedGroup],
    members: Seq[RequestProposals],
    budget: RowBudget,
    step: StepRows,
    prices: tuple[CostCurve | None, float],
) -> None:
    """Choose the best candidates of all groups within the budget, and give every request its tree and its windows."""
    ranking, group_of = merge(groups, budget.max_nodes(step))
    windows = NO_WINDOWS
    if any(member.request.speculation.uses_window for member in members):
        windows = Windows(
            [member.place for member in members],
            [member.windows for member in members],
            [member.request.speculation.state.window_value for member in members],
        )
    count, with_windows = budget.choose(ranking, windows, step, *prices)
    if with_windows:
        for member in members:
            step.plans[member.place].windows = member.windows
    if len(groups) == 1:
        groups[0].set_trees(step.plans, count)
        return
    for i, group in enumerate(groups):
        group.set_trees(step.plans, int((group_of[:count] == i).sum()))


def merge(groups: Seq[DraftedGroup], most: int) -> tuple[Ranking, Ints]:
    """Rank the candidates of several groups together, at most `most`; also returns the group of each."""
    rankings = [group.ranking() for group in groups]
    if len(rankings) == 1:
        return rankings[0], NO_GROUPS
    scores = np.concatenate([ranking.scores for ranking in rankings])
    gains = np.concatenate([ranking.gains for ranking in rankings])
    owners = np.concatenate([ranking.owners for ranking in rankings])
    group_of = np.repeat(np.arange(len(groups), dtype=np.int64), [len(ranking.scores) for ranking in rankings])
    order = np.argsort(-scores, kind="stable")[:most]  # stable: parents stay before their children
    return Ranking(scores[order], gains[order], owners[order]), group_of[order]
