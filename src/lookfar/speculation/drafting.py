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
from lookfar.speculation.chains import (
    CANDIDATE_RANGE,
    CANDIDATES,
    Chains,
    ReplayCost,
    StepWidth,
    find_chains,
    path_to,
)
from lookfar.speculation.interface import SpeculatedRequest, Walk
from lookfar.speculation.proposals import DraftingBatch, Member, Proposals
from lookfar.speculation.row_budget import BudgetKind, Prices, Ranking, RowBudget, StepRows, Windows, kind_of
from lookfar.speculation.tree_builder import DEPTH, BuildLimits, Candidates, build_candidates

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

    def chains(self, kind: BudgetKind, limits: Int32s, step: StepRows) -> list[Chains]:
        """Return the best paths of each member; their budgets allow `limits` drafts."""
        gains = self.acceptance.calibration.apply(self.candidates.scores)
        longest = int(self.candidates.column(DEPTH).max())
        values, ends = find_chains(self.candidates.nodes, gains, len(self.members), longest)
        found = []
        for i, member in enumerate(self.members):
            length = min(int((ends[i] >= 0).sum()), member.request.speculation.max_rows + 1)
            pending, limit = step.lengths[member.place], int(limits[i])
            found.append(Chains(member.place, pending, limit, kind, values[i, :length], ends[i, :length]))
        return found

    def choose_chains(self, chains: Seq[Chains], width: int, batch: int) -> None:
        """Make trees of the paths that fill steps of so many rows."""
        paths, owners = [], []
        for chain in chains:
            length = min(width - chain.num_pending, chain.longest)
            paths.append(path_to(self.candidates.nodes, chain.ends[length], length))
            owners += [chain.place] * length
        self.candidates.chosen, self.candidates.owners = np.concatenate(paths), np.array(owners, np.int32)
        self.choose(len(owners), batch)

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
    expected: float | None = 0.0  # accepted tokens, by the urgency of their requests; None: not known


@dataclass
class SourceGroup:
    """Members with one table and one acceptance model, which share a build."""

    chosen: list[int]  # indexes of members
    members: list[Member]
    max_rows: Int32s  # [members] the most drafts that each may have
    own_rows: Int32s  # [members] those of its own budget, without rows that others leave


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
        self.replay = ReplayCost()
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
                own = most if kind != "number" else np.array([budgets[m.place] for m in members], np.int32) - 1
                sources.append(SourceGroup(chosen, members, most, own))
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
        if step.limits.chain:
            return self._draft_chains(proposals, step, prices)
        drafts = Drafts([], self.members, proposals.urgency)
        for group in self._budgets:
            if drafts.groups:
                step.count_rows()
            drafted = [build_group(proposals, sources, (group.budget, prices), step) for sources in group.sources]
            counts, expected = choose_rows(drafted, group.members, group.budget, step, prices)
            drafts.expected = (drafts.expected or 0.0) + expected
            for one, count in zip(drafted, counts, strict=True):
                one.choose(count, len(step.plans))
            trees = set_trees(drafted, step.plans)
            drafts.trees = trees if not drafts.groups else None
            drafts.groups += drafted
        return drafts

    def _draft_chains(self, proposals: Proposals, step: StepRows, prices: Prices) -> Drafts:
        """Give every member the best path of a length that all requests of the step have in common."""
        drafted, chains = [], []
        for group in self._budgets:
            for sources in group.sources:
                drafted.append(build_group(proposals, sources, (group.budget, prices), step))
                chains.append(drafted[-1].chains(group.budget.kind, sources.own_rows, step))
        everyone = [chain for of_group in chains for chain in of_group]
        costs = None
        if prices.costs is not None:
            costs = prices.table(len(step.lengths) * max(c.num_pending + c.longest for c in everyone))
        rows = StepWidth(everyone, step.lengths, costs)
        width = rows.best()
        if step.limits.recurrent:
            width = rows.settle(width, self.replay)
        for one, own in zip(drafted, chains, strict=True):
            one.choose_chains(own, width, len(step.plans))
        return Drafts(drafted, self.members, proposals.urgency, set_trees(drafted, step.plans), expected=None)


def build_group(
    proposals: Proposals, group: SourceGroup, rows: tuple[RowBudget, Prices], step: StepRows
) -> DraftedGroup:
    """Build the candidates of members that share a build."""
    budget, prices = rows
    vocab_size = group.members[0].request.speculation.state.sources.vocab_size
    most, max_nodes = group.max_rows, budget.max_nodes(step)
    if step.limits.chain:  # a choice between paths
        most = np.maximum(group.own_rows, np.clip(CANDIDATES * group.own_rows, *CANDIDATE_RANGE)).astype(np.int32)
        max_nodes = int(most.sum())
    limits = BuildLimits(max_nodes, most, budget.min_score(step, prices), vocab_size)
    inputs = proposals.of(group.chosen, step.limits.depth)
    return DraftedGroup(group.members, build_candidates(inputs, limits), inputs.acceptance)


def set_trees(groups: Seq[DraftedGroup], plans: Seq[RequestPlan]) -> DraftTrees | None:
    """Give every request of some groups its tree; returns all of them if they are of one group."""
    for group in groups:
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
) -> tuple[list[int], float]:
    """Choose the best candidates of all groups within the budget, and feed windows if they pay.

    Returns how many candidates of each group are verified, best first, and how many tokens are expected of them.
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
    expected = float(ranking.gains[:count].sum())
    if len(groups) == 1:
        return [count], expected
    return [int(number) for number in np.bincount(group_of[:count], minlength=len(groups))], expected


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
