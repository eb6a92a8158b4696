"""Plans of steps in which every request decodes: its last token, and a draft tree. NumPy only.

Most steps are of this kind, so their plans begin as a few arrays for the whole batch. The plan of a single request is
made only when something asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
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


class DecodePlan(StepPlan):
    """A step in which every request feeds its last token and a draft tree."""

    def __init__(
        self, batch: DecodingRequests, tokens: Ints, num_cached: Ints, trees: DraftTrees | None = None, top_k: int = 0
    ) -> None:
        self._decoding = batch
        self.trees = trees if trees is not None else batch.no_trees
        self.num_cached = num_cached
        starts = self.trees.starts
        about = batch.about.copy()
        about[:, NUM_CACHED] = num_cached
        if starts[-1]:
            ends = np.array(starts)
            about[:, FIRST_NODE], about[:, NUM_NODES] = ends[:-1], ends[1:] - ends[:-1]
        self.flat = FlatPlan(about, tokens, self.trees.columns)
        self.handles, self.samplers, self.has_embeds = batch.handles, batch.samplers, batch.has_embeds
        self.position_offsets, self.has_windows = batch.position_offsets, False
        self.num_pending, self.complete = batch.num_pending, batch.complete
        self._set(top_k, [1 + end - start for start, end in pairwise(starts)])

    @cached_property
    def requests(self) -> Seq[RequestPlan]:
        tokens, cached, trees = self.flat.pending, self.num_cached.tolist(), self.trees.split()
        parts = enumerate(zip(cached, trees, strict=True))
        return [self._decoding.plan(i, tokens[i : i + 1], count, tree) for i, (count, tree) in parts]
