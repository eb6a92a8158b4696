"""Chains: the best single path of every request, for models whose drafts cannot be verified as a tree.

All requests of a step get the same number of rows, since padding would enter a recurrent state: those with fewer
pending tokens verify more drafts. A request whose pending tokens fill the step has no drafts; its step is kept whatever
the model says, and nothing is fed again afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.speculation.candidates import DEPTH, OWNER, PARENT
from lookfar.speculation.row_budget import BudgetKind

CANDIDATES = 4  # candidates to build for each row of a chain, so that there is a choice between paths
CANDIDATE_RANGE = (32, 64)  # for each request, or as many as it may verify
MAX_PENDING = 16  # tokens that are fed again if costs are unknown; then a step without drafts caches them


@dataclass(slots=True)
class Chains:
    """The best paths of one request, by length."""

    place: int  # in the step
    num_pending: int
    limit: int  # drafts that its budget allows
    kind: BudgetKind
    values: Floats  # [longest + 1] the expected accepted tokens of the best path of each length
    ends: Int32s  # [longest + 1] the candidate that it ends with

    @property
    def longest(self) -> int:
        return len(self.values) - 1


class ReplayCost:
    """Decides when pending tokens are settled by a step without drafts, rather than fed again with the next drafts.

    Feeding them again costs `excess` seconds in a step, and more in each step, since their number grows. Settling costs
    the `price` of one step without drafts. The average over the steps since the last one is least if it is done as soon
    as the excess of the next step would exceed that average.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._spent = 0.0

    def settles(self, excess: float, price: float) -> bool:
        """Decide for a step with pending tokens of earlier steps."""
        self._steps += 1
        if excess * self._steps >= price + self._spent:
            self.restart()
            return True
        self._spent += excess
        return False

    def restart(self) -> None:
        """Note that nothing is fed again."""
        self._steps, self._spent = 0, 0.0


@jit
def find_chains(nodes, gains, batch, longest):  # type: ignore[no-untyped-def]
    """Return the expected accepted tokens of the best path of each request and length, and its last candidate.

    [batch, longest + 1] each; -1 where there is no path of that length.
    """
    values, ends = np.full((batch, longest + 1), -1.0, np.float32), np.full((batch, longest + 1), -1, np.int32)
    sums = np.zeros(len(nodes), np.float32)  # along the path to each candidate
    for node in range(len(nodes)):  # parents come before their children
        owner, depth = nodes[node, OWNER], nodes[node, DEPTH]
        if depth:
            sums[node] = sums[nodes[node, PARENT]] + gains[node]
        if depth <= longest and sums[node] > values[owner, depth]:
            values[owner, depth], ends[owner, depth] = sums[node], node
    return values, ends


@jit
def path_to(nodes, end, length):  # type: ignore[no-untyped-def]
    """Return the candidates of a path, from its first token on."""
    path = np.empty(length, np.int32)
    for place in range(length - 1, -1, -1):
        path[place] = end
        end = nodes[end, PARENT]
    return path


class StepWidth:
    """The rows of each request of a step, and what they are expected to bring and to cost."""

    def __init__(self, chains: Seq[Chains], pending: Seq[int], costs: Floats | None) -> None:
        self.chains = chains
        self.batch = len(pending)
        self.costs = costs  # seconds by the rows of a step; None: unknown
        self.least = max(pending)
        asked = (chain.num_pending + min(chain.longest, chain.limit) for chain in chains)
        self.most = max(self.least, *asked)

    def tokens(self, widths: Ints) -> Floats:
        """Return the tokens that steps of some widths are expected to emit."""
        found = np.full(len(widths), self.batch, np.float32)
        for chain in self.chains:
            found += chain.values[np.minimum(widths - chain.num_pending, chain.longest)]
        return found

    def seconds(self, widths: Ints) -> Floats:
        assert self.costs is not None
        return self.costs[np.minimum(self.batch * widths, len(self.costs) - 1)]

    def best(self) -> int:
        """Return the width with the most expected tokens per second; all that is asked for if budgets are not auto."""
        if self.costs is None or any(chain.kind != "auto" for chain in self.chains):
            return self.most
        widths = np.arange(self.least, self.most + 1)
        return self.least + int(np.argmax(self.tokens(widths) / self.seconds(widths)))

    def settle(self, width: int, replay: ReplayCost) -> int:
        """Return the width, or that of a step that settles the most pending tokens."""
        if self.least == 1 or width == self.least:
            replay.restart()
            return width
        if self.costs is None:
            return width if self.least <= MAX_PENDING else self.least
        widths = np.array([width, self.least, width - self.least + 1])
        seconds, settled, without = self.seconds(widths).tolist()
        tokens, fewer = self.tokens(widths[:2]).tolist()
        price = (tokens - fewer) * seconds / tokens - (seconds - settled)
        return self.least if replay.settles(seconds - without, price) else width
