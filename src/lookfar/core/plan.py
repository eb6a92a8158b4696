"""Step plans: the rows that one forward pass feeds to the model. NumPy only.

The rows of one request are, in this order: its pending tokens (known tokens that are not in the KV cache yet; the last
of them is the last token of the text), the nodes of its draft tree (parents before children), and lookahead-window
rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lookfar.core.arrays import Bools, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.core.tree import NO_TREE, DraftTree, DraftTrees

# Columns about a request in a flat plan.
NUM_CACHED, FIRST_PENDING, NUM_PENDING, FIRST_NODE, NUM_NODES, NUM_WINDOW, COMPLETE, PREDICT = range(8)


@dataclass(frozen=True)
class RunnerLimits:
    """The steps that a runner can take."""

    rows: int | None = None  # the most rows of all requests together; None: no limit
    depth: int | None = None  # the deepest draft tree; None: no limit
    padded: bool = True  # every request is padded to the widest; False: rows lie side by side
    chain: bool = False  # drafts are verified as one chain for each request, not as a tree
    recurrent: bool = False  # a step is kept as a whole or not at all, so padding and prefills with drafts cost more
    own_threads: bool = False  # steps run on threads of their own, and torch's would compete with them
    captured: bool = False  # steps are captured for a few numbers of rows, and compute the next larger one
    tiles: tuple[int, ...] = ()  # of rows: the largest as often as it is full, then the smallest that holds the rest
    ranks: int = 1  # that share the draft rows of a step; the rank with the most rows decides what a step costs
    share: float = 1.0  # of the draft rows that this rank computes, on average


@dataclass(frozen=True)
class WindowRows:
    """Rows that are not verified but produce future drafts. Every one of them sees the pending tokens."""

    tokens: Ints  # [k]
    offsets: Ints  # [k] position after the last token of the text
    sees: Bools  # [k, k] which window rows each one sees, itself included
    wanted: Bools  # [k] rows whose chosen token the drafter wants

    def __len__(self) -> int:
        return len(self.tokens)


NO_WINDOW = WindowRows(*(np.zeros(0, np.int64),) * 2, np.zeros((0, 0), bool), np.zeros(0, bool))


class RowSampler(Protocol):
    """The interface through which a runner samples a request's tokens on the device, all rows at once."""

    @property
    def fingerprint(self) -> Hashable:
        """A key for the logits processors; None if the device cannot run them."""

    @property
    def processors(self) -> Any: ...

    @property
    def device(self) -> Any:
        """The device of the sampling noise."""

    @property
    def random(self) -> Any:
        """The request's row of the noise of its call; None: it does not sample."""

    num_emitted: int  # the position of its next token

    def noise_addresses(self, deepest: int, width: int) -> tuple[list[int], list[Any]]:
        """Return where the noise for the next token and those up to `deepest` tokens behind it lies in memory.

        Also returns what has to be kept until it is read.
        """


@dataclass(eq=False)
class RequestPlan:
    """The rows of one request in one step."""

    pending: Ints  # [p] tokens at positions num_cached … num_cached + p − 1
    num_cached: int  # tokens of the text that are in the KV cache
    kv: int = 0  # the request's handle in the KV cache
    complete: bool = True  # False: a prefill chunk, after which no token is chosen
    predict: int = 0  # how many of the last pending rows drafters want predictions of
    tree: DraftTree = NO_TREE
    windows: tuple[WindowRows, ...] = ()  # one entry for each drafter, perhaps empty; or none at all
    embeds: Any = None  # [prompt tokens, hidden] embeddings to feed instead of the prompt's token ids
    sampler: RowSampler | None = None  # for requests that sample
    position_offset: int = 0  # added to positions for the model, whose images may take fewer or more than their tokens
    source: Any = None  # what the decoder reads of its source, for encoder-decoder models

    def __len__(self) -> int:
        rows: int = len(self.pending) + self.tree.columns.shape[1]
        return rows + sum(map(len, self.windows)) if self.windows else rows

    @property
    def last_row(self) -> int:
        """The row of the last token of the text."""
        return len(self.pending) - 1

    def node_row(self, node: int) -> int:
        """Return the row of a tree node; for `ROOT`, the row of the last token."""
        return len(self.pending) + node

    def window_rows(self, drafter: int) -> slice:
        """Return the window rows of one drafter."""
        start = len(self.pending) + len(self.tree) + sum(map(len, self.windows[:drafter]))
        return slice(start, start + len(self.windows[drafter]))

    @cached_property
    def tokens(self) -> Ints:
        return np.concatenate([self.pending, self.tree.tokens, *(w.tokens for w in self.windows)])

    @cached_property
    def positions(self) -> Ints:
        last = self.num_cached + self.last_row
        pending = np.arange(self.num_cached, last + 1)
        return np.concatenate([pending, last + self.tree.depths, *(last + w.offsets for w in self.windows)])

    @cached_property
    def visible(self) -> Bools:
        """[rows, rows]: which rows of this step each row sees. Every row also sees all cached tokens."""
        window = sum(map(len, self.windows))
        visible: Bools = visibility(len(self.pending), self.tree.parents, window)
        start = len(self) - window
        for rows in self.windows:
            end = start + len(rows)
            visible[start:end, start:end] = rows.sees
            start = end
        return visible

    @cached_property
    def needs_logits(self) -> Bools:
        """[rows]: rows whose logits are needed."""
        count = max(self.predict, int(self.complete))
        pending = np.arange(len(self.pending)) >= len(self.pending) - count
        return np.concatenate([pending, np.ones(len(self.tree), bool), *(w.wanted for w in self.windows)])


class FlatPlan(NamedTuple):
    """The rows of all requests in a few arrays, for compiled code that works on a whole batch."""

    about: Ints  # [batch, columns]
    pending: Ints  # the pending tokens of all requests, one behind the other
    nodes: Int32s  # [5, nodes] their draft trees, one behind the other (`DraftTrees.columns`)


class StepPlan:
    """One forward pass for several requests.

    Its arrays hold every row, padded to the widest request. Padding rows hold token 0 at the position of the request's
    last token, see what that token sees, and are never read.
    """

    def __init__(
        self,
        requests: Seq[RequestPlan],
        top_k: int = 0,
        logit_rows: Ints | None = None,
        trees: DraftTrees | None = None,
    ) -> None:
        self._requests = requests
        if trees is not None:
            self.trees = trees  # those of the requests, if they lie behind each other already
        if logit_rows is not None:
            self.logit_rows = logit_rows
        self._set(top_k, list(map(len, requests)))

    def _set(self, top_k: int, lengths: list[int]) -> None:
        self.top_k = top_k  # how many of the most likely tokens to return for each row
        self.prefills = False  # whether prompts are processed
        self.hidden = False  # whether drafters want the last hidden states of the rows
        self.shared = False  # whether other requests run or wait, so that nothing may stall the step
        self.lengths = lengths  # the rows of each request
        self.width = max(lengths)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @cached_property
    def requests(self) -> Seq[RequestPlan]:
        """The rows of each request."""
        return self._requests

    @cached_property
    def handles(self) -> list[int]:
        """The handles of the requests in the KV cache."""
        return [rows.kv for rows in self.requests]

    @cached_property
    def num_pending(self) -> list[int]:
        """The pending tokens of each request."""
        return [len(rows.pending) for rows in self.requests]

    @cached_property
    def complete(self) -> list[bool]:
        """Whether each request chooses a token; False: a prefill chunk."""
        return [rows.complete for rows in self.requests]

    @cached_property
    def samplers(self) -> dict[int, RowSampler]:
        """Of the requests that choose a token and sample it, by their place."""
        found = {place: rows.sampler for place, rows in enumerate(self.requests) if rows.complete}
        return {place: sampler for place, sampler in found.items() if sampler is not None}

    @cached_property
    def has_embeds(self) -> bool:
        """Whether a request has embeddings instead of token ids."""
        return any(rows.embeds is not None for rows in self.requests)

    @cached_property
    def has_windows(self) -> bool:
        """Whether there are lookahead-window rows."""
        return any(rows.windows for rows in self.requests)

    @cached_property
    def trees(self) -> DraftTrees:
        """The draft trees of all requests."""
        trees = [rows.tree for rows in self.requests]
        if any(tree is not NO_TREE for tree in trees):
            return DraftTrees.of(trees)
        return DraftTrees(NO_TREE.columns, NO_TREE.scores, [0] * (len(trees) + 1))

    @cached_property
    def flat(self) -> FlatPlan:
        about, pending, starts = [], 0, self.trees.starts
        for place, rows in enumerate(self.requests):
            count, node = len(rows.pending), starts[place]
            window = sum(map(len, rows.windows)) if rows.windows else 0
            nodes = starts[place + 1] - node
            about.append((rows.num_cached, pending, count, node, nodes, window, rows.complete, rows.predict))
            pending += count
        tokens = [rows.pending for rows in self.requests]
        all_tokens = np.concatenate(tokens) if len(tokens) > 1 else tokens[0]
        return FlatPlan(np.array(about, np.int64), all_tokens, self.trees.columns)

    @cached_property
    def num_cached(self) -> Ints:
        """[batch]"""
        return np.array([rows.num_cached for rows in self.requests], dtype=np.int64)

    @cached_property
    def num_rows(self) -> Ints:
        """[batch]"""
        return np.array(self.lengths, dtype=np.int64)

    @cached_property
    def tokens(self) -> Ints:
        """[batch, rows]"""
        tokens = np.zeros((self.batch, self.width), dtype=np.int64)
        for i, rows in enumerate(self.requests):
            tokens[i, : len(rows)] = rows.tokens
        return tokens

    @cached_property
    def positions(self) -> Ints:
        """[batch, rows]"""
        positions = np.zeros((self.batch, self.width), dtype=np.int64)
        for i, rows in enumerate(self.requests):
            positions[i, : len(rows)] = rows.positions
            positions[i, len(rows) :] = rows.num_cached + rows.last_row
        return positions

    @cached_property
    def position_offsets(self) -> Ints:
        """[batch] to add to positions for the model."""
        return np.array([rows.position_offset for rows in self.requests], dtype=np.int64)

    @cached_property
    def logit_rows(self) -> Ints:
        """Rows whose logits are computed: the union over the batch, since a model takes one list for all requests."""
        needed = np.zeros(self.width, dtype=bool)
        for rows in self.requests:
            needed[: len(rows)] |= rows.needs_logits
        return np.flatnonzero(needed)

    @cached_property
    def visible(self) -> Bools:
        """[batch, rows, rows]; only built for steps that need a mask."""
        visible = np.zeros((self.batch, self.width, self.width), dtype=bool)
        for i, rows in enumerate(self.requests):
            n = len(rows)
            visible[i, :n, :n] = rows.visible
            visible[i, n:] = visible[i, rows.last_row]
        return visible

    def split(self) -> list[StepPlan]:
        """Return a plan for each request, with as many logits as this one has."""
        alone = [StepPlan([rows], 0, np.minimum(self.logit_rows, len(rows) - 1)) for rows in self.requests]
        for plan in alone:
            plan.prefills = self.prefills
        return alone

    @property
    def is_causal(self) -> bool:
        """Whether any causal model can run this step as it is: the next tokens of texts of equal length."""
        only_pending = all(len(rows) == len(rows.pending) for rows in self.requests)
        return only_pending and bool(
            (self.num_cached == self.num_cached[0]).all() and (self.num_rows == self.num_rows[0]).all()
        )

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Place values of the logit rows, [batch, logit rows, …], at their rows, [batch, rows, …]; -1 elsewhere."""
        if len(self.logit_rows) == self.width:
            return values
        spread = np.full((self.batch, self.width, *values.shape[2:]), -1, values.dtype)
        spread[:, self.logit_rows] = values
        return spread


@jit
def visibility(pending, parents, window):  # type: ignore[no-untyped-def]
    """[rows, rows]: pending tokens are causal, every other row sees them, and a node sees the path to it.

    The caller fills in which of the `window` rows at the end see each other.
    """
    nodes = len(parents)
    rows = pending + nodes + window
    visible = np.zeros((rows, rows), np.bool_)
    for row in range(pending):
        visible[row, : row + 1] = True
    for row in range(pending, rows):
        visible[row, :pending] = True
    for node in range(nodes):
        row, parent = pending + node, parents[node]
        for seen in range(pending, pending + parent + 1):  # a slice would take a second longer to compile
            visible[row, seen] = visible[pending + parent, seen]
        visible[row, row] = True
    return visible
