"""Drafters → one plan: every sequence's root, one tree of the best guesses of all its sources, and the riders."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from lookfar.answers import Room
from lookfar.arrays import Int32s
from lookfar.budget import CostCurve, best_count
from lookfar.calibration import Calibration
from lookfar.config import Recycle
from lookfar.drafters.base import Proposal, stack
from lookfar.forest import Forest, Luck, Offers, cut, grow_forest
from lookfar.memory import Memory
from lookfar.sequence import Sequence
from lookfar.successors import NO_SUCCESSORS, SAMPLED_TOP
from lookfar.tree import Plan, Riders, SequencePlan, TokenTree

NO_PROPOSAL = Proposal()
ANY_ROOM = Room()
WORTH_A_LOOK = 0.01  # an automatic budget leaves candidates below this chance aside
LEARNED_PROMPT = 128  # predictions of this many rows of a prompt are made for drafters, or of as many as it may emit


@dataclass(slots=True)
class Guesses:
    """The candidates of a step, fed or not, and whose estimates they were."""

    forest: Forest
    calibration: Calibration

    @property
    def tree_names(self) -> tuple[str, ...]:
        """The sources by number; the last one stands for candidates that only successors offer."""
        return (*self.calibration.sources, Recycle.name)

    def learn(self, place: int, emitted: list[int]) -> None:
        """Compare the candidates of the sequence at `place` with what its text went on with."""
        self.forest.teach(place, np.array(emitted, dtype=np.int32), self.calibration)


def plan_step(
    sequences: Seq[Sequence],
    first_slot: int,
    pieces: Seq[int],
    memory: Memory,
    costs: CostCurve | None = None,
    room: Room = ANY_ROOM,
    guess: bool = True,
    overhead: float = 0.0,
) -> Plan:
    """Plan the next forward of sequences in neighbouring slots.

    `pieces` says how many known tokens each of them may feed, which matters while it reads its prompt. `overhead` is
    what a step with guesses takes besides the forward, in seconds: rows have to pay for it only once.
    """
    chains = [plan_chain(sequence, piece, room.fixed) for sequence, piece in zip(sequences, pieces, strict=True)]
    if not guess or not any(sequence.drafters for sequence in sequences):
        return Plan(chains, first_slot)
    proposals = [_propose(sequence, chain) for sequence, chain in zip(sequences, chains, strict=True)]
    if not any(map(len, proposals)):
        return Plan(chains, first_slot)
    limits = _limits(sequences, chains, room)
    guesses = _grow(sequences, proposals, memory, limits, room)
    riders = [tuple(proposal.riders for proposal in of_one) for of_one in proposals]
    count, riding = _afford(sequences, chains, riders, guesses.forest, costs, memory, limits, room, overhead)
    for chain, tree, of_one in zip(chains, _trees(guesses, count, len(sequences)), riders, strict=True):
        chain.tree, chain.riders = tree, of_one if riding else ()
    return Plan(chains, first_slot, guesses=guesses)


def plan_chain(sequence: Sequence, piece: int, roots_alone: bool = False) -> SequencePlan:
    """A piece of the prompt while much of it is left; otherwise the rest of it, at the least the root.

    With `roots_alone` the root comes in a step of its own, which emits tokens and reads no prompt.
    """
    chain = sequence.chain(min(piece, max(sequence.uncached - 1, 1)) if roots_alone else piece)
    learned = 0
    if sequence.wants_predictions:
        known = sequence.cached + len(chain)
        rows = max(LEARNED_PROMPT, sequence.request.max_new_tokens)
        learned = max(known - max(len(sequence.request.prompt) - rows, sequence.cached), 0)
    return SequencePlan(chain, sequence.cached, complete=len(chain) == sequence.uncached, learned=learned)


def _propose(sequence: Sequence, chain: SequencePlan) -> list[Proposal]:
    # The bonus token is always emitted, so a guess deeper than this could never be.
    limit = sequence.remaining - 1
    if not chain.complete or limit < 1:
        return []
    return [drafter.propose(sequence.ids, limit) for drafter in sequence.drafters]


def _grow(
    sequences: Seq[Sequence],
    proposals: Seq[Seq[Proposal]],
    memory: Memory,
    limits: tuple[int, Int32s, float],
    room: Room,
) -> Guesses:
    """All candidates for all sequences, in one heap."""

    def deepest(sequence: Sequence) -> int:
        return min(sequence.remaining - 1, room.depth or sequence.remaining)

    names: list[str] = []
    drafted: list[Proposal] = []
    sources: list[int] = []
    counts = [0]
    recycled, runners = NO_SUCCESSORS, np.empty((len(sequences), SAMPLED_TOP - 1), np.int32)
    runners.fill(-1)
    runner_logits = np.zeros(runners.shape, np.float32)
    for i, (sequence, of_one) in enumerate(zip(sequences, proposals, strict=True)):
        counts.append(counts[-1])
        for drafter, proposal in zip(sequence.drafters, of_one, strict=False):
            if proposal.successors is not None:
                recycled = proposal.successors
                runners[i, : len(proposal.runners)] = proposal.runners
                runner_logits[i, : len(proposal.runners)] = proposal.runner_logits
                continue
            if drafter.name not in names:
                names.append(drafter.name)
            if len(proposal.drafts):
                drafted.append(proposal)
                sources += [names.index(drafter.name)] * len(proposal.drafts)
                counts[-1] += len(proposal.drafts)
    offers = Offers(
        drafts=stack([proposal.drafts for proposal in drafted]),
        grades=np.concatenate([p.grades for p in drafted]) if drafted else NO_PROPOSAL.grades,
        weights=np.concatenate([p.weights for p in drafted]) if drafted else NO_PROPOSAL.weights,
        sources=np.array(sources, np.int32),
        starts=np.array(counts, np.int32),
        roots=np.array([[s.ids[-2] if len(s.ids) > 1 else -1, s.ids[-1]] for s in sequences], dtype=np.int32),
        runners=runners,
        runner_logits=runner_logits,
        luck=_luck(sequences),
        limits=np.array([deepest(s) if p else 0 for s, p in zip(sequences, proposals, strict=True)], np.int32),
    )
    sampled = any(sequence.request.draws is not None for sequence in sequences)
    calibration = memory.calibration(names, recycled is not NO_SUCCESSORS, sampled)
    return Guesses(grow_forest(offers, recycled, calibration, *limits), calibration)


_no_luck = lru_cache(maxsize=64)(Luck.unknown)  # never written to


def _luck(sequences: Seq[Sequence]) -> Luck:
    """The noise that the next tokens of the sampled sequences will meet, as far as it can be known."""
    sampled = [(i, s.request.draws) for i, s in enumerate(sequences) if s.request.draws is not None]
    if not sampled:
        return _no_luck(len(sequences))
    luck = Luck.unknown(len(sequences))
    for i, _ in sampled:
        luck.heads[i], luck.heats[i] = sequences[i].emitted, sequences[i].temperature
    noises = {draws.noise for _, draws in sampled}
    # Nothing is known before the first draw, nor of two calls with generators of their own that share a step.
    if len(noises) == 1 and (noise := noises.pop()).width:
        for i, draws in sampled:
            luck.rows[i] = draws.row
            noise.look_ahead(draws.row)
        luck.coming = noise.coming
    return luck


def _limits(sequences: Seq[Sequence], chains: Seq[SequencePlan], room: Room) -> tuple[int, Int32s, float]:
    """The most candidates to take, the most for each sequence, and the least chance of one."""
    extra = [sequence.request.extra_rows for sequence in sequences]
    budgets = [sequence.request.budget for sequence in sequences]
    most = sum(extra) if room.rows is None else min(sum(extra), max(room.rows - sum(map(len, chains)), 0))
    if "auto" in budgets:
        return most, np.array(extra, np.int32), WORTH_A_LOOK
    asked = sum(own if budget is None else int(budget) - 1 for budget, own in zip(budgets, extra, strict=True))
    return min(asked, most), np.array(extra, np.int32), 0.0


def _afford(
    sequences: Seq[Sequence],
    chains: Seq[SequencePlan],
    riders: Seq[tuple[Riders, ...]],
    forest: Forest,
    costs: CostCurve | None,
    memory: Memory,
    limits: tuple[int, Int32s, float],
    shape: Room,
    overhead: float,
) -> tuple[int, bool]:
    """How many candidates to feed, best first, and whether the riders come along."""
    budgets = {sequence.request.budget for sequence in sequences}
    rides = any(len(of_drafter) for of_one in riders for of_drafter in of_one)
    if not rides and (None in budgets or "auto" not in budgets):
        return len(forest.picked), False
    scores, owners = forest.scores[forest.picked], forest.owners[forest.picked]
    most, room, _ = limits
    bonus, beside_riders = 0.0, -1  # none can come along
    if rides:
        riding = np.array([sum(map(len, of_one)) for of_one in riders], dtype=np.int32)
        bonus = float(memory.rider_value * np.count_nonzero(riding))
        if (riding <= room).all():
            beside_riders = min(_fitting(owners, room - riding), most - int(riding.sum()))
    if None in budgets:  # chosen by hand, riders and all
        return (beside_riders, True) if beside_riders >= 0 else (len(scores), False)
    if "auto" in budgets:
        assert costs is not None
        fixed = np.array([len(chain) for chain in chains], dtype=np.int32)
        widest = max(map(len, chains)) + max(sequence.request.extra_rows for sequence in sequences)
        rows = len(sequences) * widest
        table = costs.table(rows if shape.rows is None else min(rows, shape.rows)) + np.float32(overhead / costs.drift)
        silent = float(sum(not chain.complete for chain in chains))  # they read, and emit nothing
        count, rate = best_count(scores, owners, fixed, table, -silent, shape.packed)
        if not rides or beside_riders < 0:
            return count, False
        other, its_rate = best_count(
            scores[:beside_riders], owners[:beside_riders], fixed + riding, table, bonus - silent, shape.packed
        )
        return (other, True) if its_rate > rate else (count, False)
    if beside_riders >= 0 and scores[:beside_riders].sum() + bonus > scores.sum():
        return beside_riders, True
    return len(scores), False


def _fitting(owners: Int32s, room: Int32s) -> int:
    """How many candidates, best first, leave every sequence within its room."""
    taken = np.zeros(len(room), dtype=int)
    for count, owner in enumerate(owners):
        taken[owner] += 1
        if taken[owner] > room[owner]:
            return count
    return len(owners)


def _trees(guesses: Guesses, count: int, batch: int) -> list[TokenTree]:
    """The best `count` candidates as one tree a sequence."""
    forest, names = guesses.forest, guesses.tree_names
    columns, scores, starts = cut(forest.nodes, forest.scores, forest.picked[:count], batch)
    trees = []
    for first, last in pairwise(starts.tolist()):
        tokens, parents, depths, sources, backers = columns[:, first:last]
        trees.append(TokenTree(tokens, parents, depths, sources, scores[first:last], backers, names))
    return trees
