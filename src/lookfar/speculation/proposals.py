"""Proposals of all drafters → the arrays that trees are built from.

Drafters that can draft together are asked once for all requests of a step, others one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from lookfar.core.arrays import Floats, Int32s, stack
from lookfar.core.plan import NO_WINDOW, WindowRows
from lookfar.drafters.base import BatchDrafter, DrafterBatch, Proposal
from lookfar.errors import RequestError
from lookfar.retrieval.off_path import PER_POSITION, POSITIONS
from lookfar.retrieval.recycle_table import NO_RECYCLING, SAMPLED_TOP_K, RecycleTable
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.candidates import BEFORE, EARLIER, LAST, MAX_DEPTH, PLACE, DraftArrays, NoiseArrays, RootArrays
from lookfar.speculation.interface import SpeculatedRequest
from lookfar.speculation.tree_builder import BuildInputs
from lookfar.speculation.urgency import Urgency

NO_INTS: Int32s = np.zeros(0, np.int32)
NO_DRAFTS = DraftArrays(np.zeros((0, 0), np.int32), NO_INTS, np.zeros(0, np.float32), NO_INTS, NO_INTS)


@dataclass(slots=True, eq=False)
class Member:
    """A request that drafts, with what its drafters of the last step proposed beside drafts."""

    place: int  # in the batch
    request: SpeculatedRequest
    table: RecycleTable = NO_RECYCLING
    windows: list[WindowRows] = field(default_factory=list)  # one for each drafter, if there are any

    @property
    def acceptance(self) -> AcceptanceModel:
        """The model that judges what is proposed."""
        samples = self.request.sampler.random is not None
        return self.request.speculation.acceptance(self.table is not NO_RECYCLING, samples)


class DraftingBatch:
    """The requests that draft in a step, with their drafters put together; kept while the requests stay the same."""

    def __init__(self, requests: Seq[SpeculatedRequest], places: Seq[int]) -> None:
        self.requests, self.places = list(requests), list(places)
        self.members = [Member(place, requests[place]) for place in places]
        self.urgency = Urgency([member.request for member in self.members])
        self.texts = [member.request.ids for member in self.members]
        self.samples = any(member.request.sampler.random is not None for member in self.members)
        self.alone = [i for i, member in enumerate(self.members) if member.request.speculation.other_drafters]
        # By class, with their members and sources.
        self._together: dict[type[BatchDrafter], tuple[DrafterBatch, list[int], Int32s]] = {}
        self.observers: list[tuple[DrafterBatch, list[int]]] = []  # those that learn from every step, and their places
        by_class: dict[type[BatchDrafter], list[int]] = {}
        for i, member in enumerate(self.members):
            for kind in member.request.speculation.batch_drafters:
                by_class.setdefault(kind, []).append(i)
        for kind, chosen in by_class.items():
            found = [self.members[i].request.speculation.batch_drafters[kind] for i in chosen]
            batch = kind.together([drafter for drafter, _ in found])
            for i, table in zip(chosen, batch.tables, strict=False):
                self.members[i].table = table
            if kind.wants_steps:
                self.observers.append((batch, [self.places[i] for i in chosen]))
            self._together[kind] = batch, chosen, np.array([source for _, source in found], np.int32)

    def drafters_of(self, kind: type[BatchDrafter], requests: Seq[SpeculatedRequest], places: Seq[int]) -> DrafterBatch:
        """Return the drafters of one class of some requests of a step, put together before or now."""
        if kind in self._together and self.requests == requests:
            batch, chosen, _ = self._together[kind]
            if [self.places[i] for i in chosen] == places:
                return batch
        return kind.together([requests[place].speculation.batch_drafters[kind][0] for place in places])

    def is_of(self, requests: Seq[SpeculatedRequest], places: Seq[int]) -> bool:
        """Whether it can be used for a step."""
        return self.places == places and self.requests == requests

    def propose(self, limits: Int32s, rows: int, others_wait: bool) -> Proposals:
        """Ask all drafters for drafts of at most so many tokens. An error of a drafter fails its request.

        About `rows` can be verified for each request; `others_wait` for a place in the batch.
        """
        found = Proposals(self.members, limits, self.urgency.of_step(others_wait), self.samples)
        for batch, chosen, sources in self._together.values():
            everyone = len(chosen) == len(self.members)
            texts = self.texts if everyone else [self.texts[i] for i in chosen]
            proposed = batch.propose(texts, limits if everyone else limits[chosen], rows)
            if proposed.runner_ups is not None:
                found.set_runner_ups(chosen, *proposed.runner_ups)
            if proposed.off_path is not None:
                found.set_off_path(chosen, proposed.off_path)
            if len(proposed.drafts):
                owners = proposed.owners if everyone else np.array(chosen, np.int32)[proposed.owners]
                all_sources = proposed.sources + sources[proposed.owners]
                own = proposed.drafts, proposed.scores, proposed.weights, all_sources, owners
                found.parts.append(DraftArrays(*own))
        for i in self.alone:
            try:
                for source, proposal in _propose_alone(self.members[i], int(limits[i])):
                    found.add(i, source, proposal)
            except BaseException as error:  # a drafter of another package
                self.members[i].request.fail(error)
        return found


class Proposals:
    """What the drafters of all requests of a step propose. Drafts and runner-ups belong to members by their index."""

    def __init__(self, members: list[Member], limits: Int32s, urgency: Floats, samples: bool) -> None:
        self.members = members
        self.samples = samples  # whether a member does
        self.limits = limits
        self.urgency = urgency  # of the members
        self.parts: list[DraftArrays] = []
        self.runner_ups: tuple[Int32s, Floats] | None = None  # [members, k]
        self.off_path: Int32s | None = None  # [members, 2, positions, k]

    def add(self, member: int, source: int, proposal: Proposal) -> None:
        """Add the proposal of one drafter."""
        if len(proposal.runner_ups):
            tokens, logits = no_runner_ups(1)
            count = min(len(proposal.runner_ups), tokens.shape[1])
            tokens[0, :count], logits[0, :count] = proposal.runner_ups[:count], proposal.runner_up_logits[:count]
            self.set_runner_ups([member], tokens, logits)
        if count := len(proposal.drafts):
            own, of_member = np.full(count, source, np.int32), np.full(count, member, np.int32)
            self.parts.append(DraftArrays(proposal.drafts, proposal.scores, proposal.weights, own, of_member))

    def set_runner_ups(self, members: Seq[int], tokens: Int32s, logits: Floats) -> None:
        """Set the alternatives to the last tokens of some members, [members, k]."""
        if len(members) == len(self.members):
            self.runner_ups = tokens, logits
            return
        if self.runner_ups is None:
            self.runner_ups = no_runner_ups(len(self.members))
        self.runner_ups[0][members], self.runner_ups[1][members] = tokens, logits

    def set_off_path(self, members: Seq[int], off_path: Int32s) -> None:
        """Set the off-path predictions of some members."""
        if len(members) == len(self.members):
            self.off_path = off_path
            return
        if self.off_path is None:
            self.off_path = no_off_path(len(self.members))
        self.off_path[members] = off_path

    @cached_property
    def drafts(self) -> DraftArrays:
        """The drafts of all members, once everything is added."""
        if len(self.parts) < 2:
            return self.parts[0] if self.parts else NO_DRAFTS
        tokens, *others = zip(*self.parts, strict=True)
        return DraftArrays(stack(tokens), *map(np.concatenate, others))

    def of(self, chosen: Seq[int], max_depth: int | None) -> BuildInputs:
        """Return the arrays for some of the members, which share a table and an acceptance model."""
        members, drafts, limits, urgency = self.members, self.drafts, self.limits, self.urgency
        runner_ups, logits = self.runner_ups or no_runner_ups(len(members))
        off_path = self.off_path if self.off_path is not None else no_off_path(len(members))
        if len(chosen) < len(members):
            new_place = np.full(len(members), -1, np.int32)
            new_place[chosen] = np.arange(len(chosen))
            kept = np.flatnonzero(new_place[drafts.owners] >= 0)
            drafts = drafts.select(kept)._replace(owners=new_place[drafts.owners[kept]])
            runner_ups, logits, off_path = runner_ups[chosen], logits[chosen], off_path[chosen]
            limits, urgency = limits[chosen], urgency[chosen]
            members = [members[i] for i in chosen]
        texts = [member.request.ids for member in members]
        about: Int32s = np.empty((len(members), 5), np.int32)
        about[:, EARLIER] = [ids[-3] if len(ids) > 2 else -1 for ids in texts]
        about[:, BEFORE] = [ids[-2] if len(ids) > 1 else -1 for ids in texts]
        about[:, LAST] = [ids[-1] for ids in texts]
        about[:, MAX_DEPTH] = limits if max_depth is None else np.minimum(limits, max_depth)
        about[:, PLACE] = [member.place for member in members]
        noise = known_noise([member.request for member in members]) if self.samples else _unknown_noise(len(members))
        roots = RootArrays(about, runner_ups, logits, off_path, urgency)
        return BuildInputs(drafts, roots, noise, members[0].table, members[0].acceptance)


def no_runner_ups(members: int) -> tuple[Int32s, Floats]:
    """Return arrays for members without runner-ups."""
    shape = members, SAMPLED_TOP_K - 1
    return np.full(shape, -1, np.int32), np.zeros(shape, np.float32)


def no_off_path(members: int) -> Int32s:
    """Return the array for members without off-path predictions."""
    return np.zeros((members, 2, POSITIONS, PER_POSITION), np.int32)


def _propose_alone(member: Member, limit: int) -> list[tuple[int, Proposal]]:
    """Ask the drafters of a request that draft for one request at a time; returns sources and proposals."""
    speculation, found = member.request.speculation, []
    member.windows = []
    for index, drafter, source in speculation.other_drafters:
        proposal = drafter.propose(member.request.ids, limit)
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


_unknown_noise = lru_cache(maxsize=64)(NoiseArrays.unknown)  # never written to


def known_noise(requests: Seq[SpeculatedRequest]) -> NoiseArrays:
    """Return the noise that the next tokens of sampled requests will meet, as far as it is known."""
    sampled = [(i, r.sampler) for i, r in enumerate(requests) if r.sampler.random is not None]
    arrays = NoiseArrays.unknown(len(requests))
    for i, sampler in sampled:
        arrays.positions[i], arrays.temperatures[i] = sampler.num_emitted, sampler.temperature
    noises = {sampler.random.noise for _, sampler in sampled if sampler.random is not None}
    # It is unknown before the first draw, and for requests of different calls that share a step.
    if len(noises) != 1 or not (noise := noises.pop()).is_known:
        return arrays
    for i, sampler in sampled:
        assert sampler.random is not None
        arrays.rows[i] = sampler.random.row
        noise.fetch(sampler.random.row)
    return arrays._replace(upcoming=noise.upcoming)
