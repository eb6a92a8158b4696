"""Plans of steps in which all or most requests decode: their last token, and a draft tree. NumPy only.

Most steps are of this kind, so their plans begin as a few arrays for the whole batch. The plan of a single request is
made only when something asks for it, or if it feeds a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from lookfar.core.arrays import Ints
from lookfar.core.plan import (
    COMPLETE,
    FIRST_NODE,
    FIRST_PENDING,
    NUM_CACHED,
    NUM_NODES,
    NUM_PENDING,
    PREDICT,
    FlatPlan,
    RequestPlan,
    StepPlan,
)
from lookfar.core.tree import NO_TREE, DraftTree, DraftTrees


class DecodingRequests:
    """What the plans of some requests have in common as long as these requests decode together."""

    def __init__(self, plans: Seq[RequestPlan]) -> None:
        self.plans = plans  # of any step of the requests
        self.handles = [rows.kv for rows in plans]
        self.num_pending, self.complete = [1] * len(plans), [True] * len(plans)
        self.samplers = {place: rows.sampler for place, rows in enumerate(plans) if rows.sampler is not None}
        self.has_embeds = any(rows.embeds is not None for rows in plans)
        self.position_offsets: Ints = np.array([rows.position_offset for rows in plans], np.int64)
        self.no_trees = DraftTrees(NO_TREE.columns, NO_TREE.scores, [0] * (len(plans) + 1))
        self.about: Ints = np.zeros((len(plans), 8), np.int64)
        self.about[:, FIRST_PENDING], self.about[:, NUM_PENDING] = np.arange(len(plans)), 1
        self.about[:, COMPLETE], self.about[:, PREDICT] = 1, [rows.predict for rows in plans]

    def plan(self, place: int, token: Ints, num_cached: int, tree: DraftTree) -> RequestPlan:
        """Return the plan of one request."""
        like = self.plans[place]
        return RequestPlan(
            token,
            num_cached,
            like.kv,
            predict=like.predict,
            tree=tree,
            embeds=like.embeds,
            sampler=like.sampler,
            position_offset=like.position_offset,
            source=like.source,
        )


@dataclass(frozen=True)
class LastTokens:
    """What requests feed: their last tokens, behind those that are cached; or, for some, plans of their own."""

    tokens: Ints  # [batch]
    num_cached: Ints  # [batch]
    prefills: Mapping[int, RequestPlan] = field(default_factory=dict)  # by place, without trees


class DecodePlan(StepPlan):
    """A step in which requests feed their last token, or a part of their prompt, and a draft tree."""

    def __init__(
        self, batch: DecodingRequests, fed: LastTokens, trees: DraftTrees | None = None, top_k: int = 0
    ) -> None:
        self._decoding, self._fed = batch, fed
        self.trees = trees if trees is not None else batch.no_trees
        self.num_cached = fed.num_cached
        starts = self.trees.starts
        about = batch.about.copy()
        about[:, NUM_CACHED] = fed.num_cached
        if starts[-1]:
            ends = np.array(starts)
            about[:, FIRST_NODE], about[:, NUM_NODES] = ends[:-1], ends[1:] - ends[:-1]
        self.handles, self.samplers, self.has_embeds = batch.handles, batch.samplers, batch.has_embeds
        self.position_offsets, self.has_windows = batch.position_offsets, False
        self.num_pending, self.complete = batch.num_pending, batch.complete
        pending = self._add_prefills(about) if fed.prefills else fed.tokens
        self.flat = FlatPlan(about, pending, self.trees.columns)
        sizes = zip(self.num_pending, pairwise(starts), strict=True)
        self._set(top_k, [count + end - start for count, (start, end) in sizes])

    def _add_prefills(self, about: Ints) -> Ints:
        """Describe the requests with plans of their own; returns the pending tokens of all requests."""
        prefills = self._fed.prefills
        self.num_pending, self.complete = self.num_pending.copy(), self.complete.copy()
        for place, rows in prefills.items():
            self.num_pending[place], self.complete[place] = len(rows.pending), rows.complete
            about[place, NUM_PENDING], about[place, COMPLETE] = len(rows.pending), rows.complete
            about[place, PREDICT] = rows.predict
        self.samplers = {place: own for place, own in self.samplers.items() if self.complete[place]}
        about[1:, FIRST_PENDING] = np.cumsum(about[:-1, NUM_PENDING])
        pending: Ints = np.empty(about[:, NUM_PENDING].sum(), np.int64)
        pending[about[:, FIRST_PENDING]] = self._fed.tokens
        for place, rows in prefills.items():
            first = about[place, FIRST_PENDING]
            pending[first : first + len(rows.pending)] = rows.pending
        return pending

    @property
    def prefilled(self) -> Seq[int]:
        """The places of the requests that feed more than their last token."""
        return list(self._fed.prefills)

    @cached_property
    def requests(self) -> Seq[RequestPlan]:
        found, fed = [], self._fed
        for place, (count, tree) in enumerate(zip(fed.num_cached.tolist(), self.trees.split(), strict=True)):
            if (rows := fed.prefills.get(place)) is not None:
                rows.tree = tree
            else:
                rows = self._decoding.plan(place, fed.tokens[place : place + 1], count, tree)
            found.append(rows)
        return found
