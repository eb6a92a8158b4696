"""Proposals → draft trees: the requests of a step are grouped, their candidates built, and the best ones chosen.

Sources, budgets and tables belong to a request. Requests with the same ones share a build and compete for rows;
requests with other ones do not change theirs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.host_team import ALONE, present_team
from lookfar.core.plan import RequestPlan, WindowRows
from lookfar.core.tree import NO_TREE, DraftTrees
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.candidates import DEPTH, BuildLimits, Candidates
from lookfar.speculation.chains import (
    CANDIDATE_RANGE,
    CANDIDATES,
    Chains,
    ReplayCost,
    StepWidth,
    find_chains,
    path_to,
)
from lookfar.speculation.interface import SpeculatedRequest, Walks
from lookfar.speculation.proposals import DraftingBatch, Member, Proposals
from lookfar.speculation.row_budget import BudgetKind, Prices, Ranking, RowBudget, StepRows, Windows, kind_of
from lookfar.speculation.tree_builder import build_candidates

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
    ends: Int32s  # what the texts of the members end with (`RootArrays.about`)
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

    def count(self, walks: Walks[Any], finished: bool) -> None:
        """Count the draft tokens by source, of the requests that have ended or of the others."""
        proposed = self.trees.count_sources()
        sources = self.trees.columns[3].tolist()
        for member in self.members:
            walk = walks[member.place]
            if walk is not None and member.request.is_finished == finished:
                first = self.trees.starts[member.place]
                accepted = [sources[first + node] for node in walk.nodes]
                member.request.count_drafts(self.trees.names, proposed[member.place], accepted)

    def learn(self, walks: Walks[Any]) -> None:
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
    windows: dict[int, tuple[WindowRows, ...]] = field(default_factory=dict)  # of requests that feed any, by place
    expected: float | None = 0.0  # accepted tokens, by the urgency of their requests; None: not known

    @property
    def trees(self) -> DraftTrees | None:
        """The trees of all requests, if they were built together."""
        return self.groups[0].trees if len(self.groups) == 1 else None

    @property
    def ends(self) -> Int32s | None:
        """What the texts of all members end with, if their trees were built together."""
        return self.groups[0].ends if len(self.groups) == 1 else None

    def add_to(self, plans: Seq[RequestPlan]) -> None:
        """Give every request its tree and its window."""
        for group in self.groups:
            trees = group.trees.split()
            for member in group.members:
                plans[member.place].tree = trees[member.place]
        for place, windows in self.windows.items():
            plans[place].windows = windows


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
    uses_window: bool

    def windows(self) -> Windows:
        """Return the lookahead-window rows that the drafters of the members propose."""
        if not self.uses_window:
            return NO_WINDOWS
        return Windows(
            [member.place for member in self.members],
            [tuple(member.windows) for member in self.members],
            [member.request.speculation.state.window_value for member in self.members],
        )


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
            uses_window = any(member.request.speculation.uses_window for member in everyone)
            found.append(BudgetGroup(budget, everyone, sources, uses_window))
        return found

    def draft(self, limits: Int32s, step: StepRows, prices: Prices) -> Drafts:
        """Draft for a step: trees that are at most `limits` deep for each member, and windows."""
        most = sum(group.budget.max_nodes(step) for group in self._budgets)
        about = 2 * most // len(self.members)  # a confident request takes what others leave
        proposals = self.propose(limits, about, step.others_wait)
        if self.alone:  # their tables may change
            rates = {group.budget.kind: group.budget.rate for group in self._budgets}
            self._budgets = self._group()
            for group in self._budgets:
                group.budget.rate = rates[group.budget.kind]
        if step.limits.chain:
            return self._draft_chains(proposals, step, prices)
        drafts = Drafts([], self.members, proposals.urgency)
        for group in self._budgets:
            drafted = [build_group(proposals, sources, (group.budget, prices), step) for sources in group.sources]
            counts, with_windows, expected = choose_rows(drafted, group, step, prices)
            drafts.expected = (drafts.expected or 0.0) + expected
            for one, count in zip(drafted, counts, strict=True):
                one.choose(count, len(step.lengths))
            drafts.groups += drafted
            own = {member.place: tuple(member.windows) for member in group.members} if with_windows else {}
            drafts.windows |= own
            if len(self._budgets) > 1:  # the next group gets the room that is left
                for one in drafted:
                    step.add([end - start for start, end in pairwise(one.trees.starts)])
                step.add([sum(map(len, own.get(place, ()))) for place in range(len(step.lengths))])
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
            one.choose_chains(own, width, len(step.lengths))
        return Drafts(drafted, self.members, proposals.urgency, expected=None)


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
    limits = BuildLimits(max_nodes, most, budget.least_scores(step, prices), vocab_size)
    inputs = proposals.of(group.chosen, step.limits.depth)
    team = ALONE if step.limits.chain else present_team(len(group.members))  # paths are found among all candidates
    return DraftedGroup(group.members, build_candidates(inputs, limits, team), inputs.acceptance, inputs.roots.about)


def choose_rows(
    groups: Seq[DraftedGroup], rows: BudgetGroup, step: StepRows, prices: Prices
) -> tuple[list[int], bool, float]:
    """Choose the best candidates of all groups within the budget.

    Returns how many candidates of each group are verified, best first, whether the windows are fed, and how many tokens
    are expected of the candidates.
    """
    ranking, group_of = merge(groups, rows.budget.max_nodes(step))
    count, with_windows = rows.budget.choose(ranking, rows.windows(), step, prices)
    expected = float(ranking.gains[:count].sum())
    if len(groups) == 1:
        return [count], with_windows, expected
    return np.bincount(group_of[:count], minlength=len(groups)).tolist(), with_windows, expected


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
