"""Proposals of all drafters → the arrays that trees are built from.

Drafters that can draft for a whole batch are asked once for all requests of a step, others one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from lookfar.core.arrays import Floats, Int32s, stack
from lookfar.core.plan import NO_WINDOW, RequestPlan, WindowRows
from lookfar.drafters.base import BatchDrafter, Proposal
from lookfar.errors import RequestError
from lookfar.retrieval.recycle_table import NO_RECYCLING, SAMPLED_TOP_K, RecycleTable
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.interface import SpeculatedRequest
from lookfar.speculation.tree_builder import BuildInputs, DraftArrays, NoiseArrays, RootArrays

NO_INTS: Int32s = np.zeros(0, np.int32)
NO_DRAFTS = DraftArrays(np.zeros((0, 0), np.int32), NO_INTS, np.zeros(0, np.float32), NO_INTS, NO_INTS)

NO_RUNNER_UPS = np.zeros((0, SAMPLED_TOP_K - 1), np.int32), np.zeros((0, SAMPLED_TOP_K - 1), np.float32)


@dataclass(slots=True, eq=False)
class Member:
    """A request that drafts in this step."""

    place: int  # in the batch
    request: SpeculatedRequest
    limit: int  # the deepest draft that could be accepted
    table: RecycleTable = NO_RECYCLING
    windows: list[WindowRows] = field(default_factory=list)  # one for each drafter, if there are any

    @property
    def acceptance(self) -> AcceptanceModel:
        """The model that judges what is proposed."""
        speculation = self.request.speculation
        samples = self.request.sampler.random is not None
        return speculation.state.acceptance(speculation.source_names, self.table is not NO_RECYCLING, samples)


@dataclass(slots=True, eq=False)
class Proposals:
    """What the drafters of all requests of a step propose. Drafts and runner-ups belong to members by their index."""

    members: list[Member]
    drafts: DraftArrays
    runner_ups: Int32s  # [members, k] -1 for none
    runner_up_logits: Floats

    def of(self, chosen: Seq[int], max_depth: int | None) -> BuildInputs:
        """Return the arrays for some of the members, which share a table and an acceptance model."""
        members, drafts = self.members, self.drafts
        runner_ups, runner_up_logits = self.runner_ups, self.runner_up_logits
        if len(chosen) < len(members):
            new_place = np.full(len(members), -1, np.int32)
            new_place[chosen] = np.arange(len(chosen))
            kept = np.flatnonzero(new_place[drafts.owners] >= 0)
            drafts = drafts.select(kept)._replace(owners=new_place[drafts.owners[kept]])
            runner_ups, runner_up_logits = runner_ups[chosen], runner_up_logits[chosen]
            members = [members[i] for i in chosen]
        about = []
        for member in members:
            ids, deepest = member.request.ids, member.limit
            before = ids[-2] if len(ids) > 1 else -1
            about.append((before, ids[-1], min(deepest, max_depth or deepest), member.place))
        roots = RootArrays(np.array(about, dtype=np.int32), runner_ups, runner_up_logits)
        noise = known_noise([member.request for member in members])
        return BuildInputs(drafts, roots, noise, members[0].table, members[0].acceptance)


def propose(requests: Seq[SpeculatedRequest], plans: Seq[RequestPlan]) -> Proposals:
    """Ask the drafters of all requests that can draft in this step. An error of a drafter fails its request."""
    members: list[Member] = []
    alone = []
    for place, (request, rows) in enumerate(zip(requests, plans, strict=True)):
        # The bonus token is always emitted, so a deeper draft could never be accepted.
        limit = request.remaining - 1
        if limit < 1 or not rows.complete or not request.speculation.drafters:
            continue
        member = Member(place, request, limit)
        if request.speculation.other_drafters:
            try:
                found = _propose_alone(member)
            except BaseException as error:  # a drafter of another package
                request.fail(error)
                continue
            alone.append((len(members), found))
        members.append(member)
    collected = Collector(members)
    by_class: dict[type[BatchDrafter], list[int]] = {}
    for i, member in enumerate(members):
        for kind in member.request.speculation.batch_drafters:
            by_class.setdefault(kind, []).append(i)
    for kind, chosen in by_class.items():
        collected.ask(kind, chosen)
    for i, proposals in alone:
        for source, proposal in proposals:
            collected.add(i, source, proposal)
    return collected.proposals()


def _propose_alone(member: Member) -> list[tuple[int, Proposal]]:
    """Ask the drafters of a request that draft for one request at a time; returns sources and proposals."""
    speculation, found = member.request.speculation, []
    for index, drafter, source in speculation.other_drafters:
        proposal = drafter.propose(member.request.ids, member.limit)
        if len(proposal.drafts):
            _check(drafter.name, proposal)
        if proposal.table is not None:
            member.table = proposal.table
        if len(proposal.window):
            member.windows = member.windows or [NO_WINDOW] * len(speculation.drafters)
            member.windows[index] = proposal.window
        found.append((source, proposal))
    return found


def _check(name: str, proposal: Proposal) -> None:
    """Refuse arrays that compiled code would misread."""
    drafts = proposal.drafts
    shapes = len(proposal.scores) == len(proposal.weights) == len(drafts) and drafts.ndim == 2
    types = drafts.dtype == proposal.scores.dtype == np.int32 and proposal.weights.dtype == np.float32
    if not (shapes and types):
        raise RequestError(
            f"The drafter {name} proposed arrays of the wrong kind: drafts [k, depth] and scores [k] are int32, "
            "weights [k] are float32; Proposal.of makes them from lists."
        )


class Collector:
    """Puts the proposals of drafters together."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.parts: list[DraftArrays] = []
        self.runner_ups: Int32s | None = None
        self.runner_up_logits: Floats | None = None

    def ask(self, kind: type[BatchDrafter], chosen: list[int]) -> None:
        """Ask the drafters of one class, those of the chosen members."""
        members = [self.members[i] for i in chosen] if len(chosen) < len(self.members) else self.members
        drafters, sources = zip(*(member.request.speculation.batch_drafters[kind] for member in members), strict=True)
        texts, limits = [member.request.ids for member in members], [member.limit for member in members]
        found = kind.propose_all(drafters, texts, limits)
        for member, table in zip(members, found.tables, strict=False):
            member.table = table
        if found.runner_ups is not None:
            self._set_runner_ups(chosen, *found.runner_ups)
        if len(found.drafts):
            of_member = np.array(sources, np.int32)
            owners = found.owners if len(chosen) == len(self.members) else np.array(chosen, np.int32)[found.owners]
            part = DraftArrays(found.drafts, found.scores, found.weights, of_member[found.owners], owners)
            self.parts.append(part)

    def add(self, member: int, source: int, proposal: Proposal) -> None:
        """Add the proposal of one drafter."""
        if len(proposal.runner_ups):
            count = min(len(proposal.runner_ups), SAMPLED_TOP_K - 1)
            tokens, logits = np.full((1, SAMPLED_TOP_K - 1), -1, np.int32), np.zeros((1, SAMPLED_TOP_K - 1), np.float32)
            tokens[0, :count], logits[0, :count] = proposal.runner_ups[:count], proposal.runner_up_logits[:count]
            self._set_runner_ups([member], tokens, logits)
        if count := len(proposal.drafts):
            own, of_member = np.full(count, source, np.int32), np.full(count, member, np.int32)
            self.parts.append(DraftArrays(proposal.drafts, proposal.scores, proposal.weights, own, of_member))

    def _set_runner_ups(self, members: Seq[int], tokens: Int32s, logits: Floats) -> None:
        if len(members) == len(self.members):
            self.runner_ups, self.runner_up_logits = tokens, logits
            return
        if self.runner_ups is None or self.runner_up_logits is None:
            shape = len(self.members), SAMPLED_TOP_K - 1
            self.runner_ups, self.runner_up_logits = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        self.runner_ups[members], self.runner_up_logits[members] = tokens, logits

    def proposals(self) -> Proposals:
        if self.runner_ups is None or self.runner_up_logits is None:
            self._set_runner_ups([], *NO_RUNNER_UPS)
        drafts = NO_DRAFTS
        if len(self.parts) == 1:
            drafts = self.parts[0]
        elif self.parts:
            tokens, *others = zip(*self.parts, strict=True)
            drafts = DraftArrays(stack(tokens), *map(np.concatenate, others))
        assert self.runner_ups is not None
        assert self.runner_up_logits is not None
        return Proposals(self.members, drafts, self.runner_ups, self.runner_up_logits)


_unknown_noise = lru_cache(maxsize=64)(NoiseArrays.unknown)  # never written to


def known_noise(requests: Seq[SpeculatedRequest]) -> NoiseArrays:
    """Return the noise that the next tokens of sampled requests will meet, as far as it is known."""
    sampled = [(i, r.sampler) for i, r in enumerate(requests) if r.sampler.random is not None]
    if not sampled:
        return _unknown_noise(len(requests))
    arrays = NoiseArrays.unknown(len(requests))
    for i, sampler in sampled:
        arrays.positions[i], arrays.temperatures[i] = sampler.num_emitted, sampler.temperature
    noises = {sampler.random.noise for _, sampler in sampled if sampler.random is not None}
    # It is unknown before the first draw, and for requests of different calls that share a step.
    if len(noises) != 1 or not (noise := noises.pop()).width:
        return arrays
    for i, sampler in sampled:
        assert sampler.random is not None
        arrays.rows[i] = sampler.random.row
        noise.fetch(sampler.random.row)
    return arrays._replace(upcoming=noise.upcoming)
