"""Proposals → draft trees: the requests of a step are grouped, their candidates built, and the best ones chosen.

Sources, budgets and tables belong to a request. Requests with the same ones share a build and compete for rows;
requests with other ones do not change theirs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import RequestPlan
from lookfar.core.tree import NO_TREE, DraftTrees
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.interface import SpeculatedRequest, Walk
from lookfar.speculation.proposals import DraftingBatch, Member, Proposals
from lookfar.speculation.row_budget import BudgetKind, Prices, Ranking, RowBudget, StepRows, Windows, kind_of
from lookfar.speculation.tree_builder import BuildLimits, Candidates, build_candidates

RECYCLED = "recycle"  # the source of candidates that no drafter drafted
NO_GROUPS: Ints = np.zeros(0, np.int64)
NO_WINDOWS = Windows((), (), ())
NO_TREES = DraftTrees.of([NO_TREE])
KINDS: tuple[BudgetKind, ...] = ("all", "number", "auto")  # budgets in the order in which they take rows


@dataclass
class DraftedGroup:
    """Requests with one table and one acceptance model, and the candidates that were built for them."""

    members: Seq[Member]
    candidates: Candidates
    acceptance: AcceptanceModel
    trees: DraftTrees = NO_TREES  # of the chosen candidates, for all requests of the step; empty for those of others

    def ranking(self) -> Ranking:
        scores, urgency = self.candidates.chosen_scores, self.candidates.urgency
        gains = self.acceptance.calibration.apply(scores) * urgency
        return Ranking(scores * urgency, gains, self.candidates.owners)

    def choose(self, count: int, batch: int) -> None:
        """Make trees of the best candidates for a step of `batch` requests."""
        self.trees = self.candidates.trees(count, (*self.acceptance.sources, RECYCLED), batch)

    def learn(self, walks: Seq[Walk | None]) -> None:
        """Teach the acceptance model what was emitted and accepted."""
        emitted: list[int] = []
        accepted: list[int] = []
        starts = [0]
        for member in self.members:
            walk = walks[member.place]
            if walk is not None:
                emitted += walk.tokens
                first = self.trees.starts[member.place]
                accepted += [first + node for node in walk.nodes]
            starts.append(len(emitted))
        self.candidates.learn(np.array(emitted, np.int32), np.array(starts, np.int32), self.acceptance)
        self.acceptance.calibration.learn(self.trees.scores, np.array(accepted, np.int32))


@dataclass
class Drafts:
    """The drafts of a step, after the best ones were chosen."""

    groups: list[DraftedGroup]
    members: Seq[Member]
    urgency: Floats  # of the members
    trees: DraftTrees | None = None  # of all requests, if they lie behind each other


@dataclass
class SourceGroup:
    """Members with one table and one acceptance model, which share a build."""

    chosen: list[int]  # indexes of members
    members: list[Member]
    max_rows: Int32s  # [members]


@dataclass
class BudgetGroup:
    """Members with budgets of one kind, which compete for rows."""

    budget: RowBudget
    members: list[Member]
    sources: list[SourceGroup]


class Drafting(DraftingBatch):
    """Drafts for the requests of a step; kept while they stay the same."""

    def __init__(self, requests: Seq[SpeculatedRequest], places: Seq[int]) -> None:
        super().__init__(requests, places)
        self._budgets = self._group()

    def _group(self) -> list[BudgetGroup]:
        """Sort members by the kind of their budget, and by table and acceptance model."""
        budgets = [request.speculation.budget for request in self.requests]
        max_rows = [request.speculation.max_rows for request in self.requests]
        by_kind: dict[BudgetKind, dict[tuple[int, int], list[int]]] = {}
        for i, member in enumerate(self.members):
            groups = by_kind.setdefault(kind_of(budgets[member.place]), {})
            groups.setdefault((id(member.table), id(member.acceptance)), []).append(i)
        found = []
        for kind in sorted(by_kind, key=KINDS.index):
            sources = []
            for chosen in by_kind[kind].values():
                members = [self.members[i] for i in chosen]
                most = np.array([max_rows[member.place] for member in members], np.int32)
                sources.append(SourceGroup(chosen, members, most))
            everyone = [member for group in sources for member in group.members]
            budget = RowBudget.of(kind, [member.place for member in everyone], budgets, max_rows)
            found.append(BudgetGroup(budget, everyone, sources))
        return found

    def draft(self, limits: Int32s, step: StepRows, prices: Prices) -> Drafts:
        """Add draft trees and windows to the plans of a step, the trees at most `limits` deep for each member."""
        most = sum(group.budget.max_nodes(step) for group in self._budgets)
        about = 2 * most // len(self.members)  # a confident request takes what others leave
        proposals = self.propose(limits, about, step.others_wait)
        if self.alone:
            self._budgets = self._group()  # their tables may change
        drafts = Drafts([], self.members, proposals.urgency)
        for group in self._budgets:
            if drafts.groups:
                step.count_rows()
            drafted = [build_group(proposals, sources, (group.budget, prices), step) for sources in group.sources]
            counts = choose_rows(drafted, group.members, group.budget, step, prices)
            trees = set_trees(drafted, counts, step.plans)
            drafts.trees = trees if not drafts.groups else None
            drafts.groups += drafted
        return drafts


def build_group(
    proposals: Proposals, group: SourceGroup, rows: tuple[RowBudget, Prices], step: StepRows
) -> DraftedGroup:
    """Build the candidates of members that share a build."""
    budget, prices = rows
    vocab_size = group.members[0].request.speculation.state.sources.vocab_size
    limits = BuildLimits(budget.max_nodes(step), group.max_rows, budget.min_score(step, prices), vocab_size)
    inputs = proposals.of(group.chosen, step.limits.depth)
    return DraftedGroup(group.members, build_candidates(inputs, limits), inputs.acceptance)


def set_trees(groups: Seq[DraftedGroup], counts: Seq[int], plans: Seq[RequestPlan]) -> DraftTrees | None:
    """Give every request of some groups its tree; returns all of them if they are of one group."""
    for group, count in zip(groups, counts, strict=True):
        group.choose(count, len(plans))
        parts = group.trees.split()
        for member in group.members:
            plans[member.place].tree = parts[member.place]
    return groups[0].trees if len(groups) == 1 else None


def choose_rows(
    groups: Seq[DraftedGroup],
    members: Seq[Member],
    budget: RowBudget,
    step: StepRows,
    prices: Prices,
) -> list[int]:
    """Choose the best candidates of all groups within the budget, and feed windows if they pay.

    Returns how many candidates of each group are verified, best first.
    """
    ranking, group_of = merge(groups, budget.max_nodes(step))
    windows = NO_WINDOWS
    if any(member.request.speculation.uses_window for member in members):
        windows = Windows(
            [member.place for member in members],
            [tuple(member.windows) for member in members],
            [member.request.speculation.state.window_value for member in members],
        )
    count, with_windows = budget.choose(ranking, windows, step, prices)
    if with_windows:
        for member in members:
            step.plans[member.place].windows = tuple(member.windows)
    if len(groups) == 1:
        return [count]
    return [int(number) for number in np.bincount(group_of[:count], minlength=len(groups))]


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
