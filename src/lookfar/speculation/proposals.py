"""Proposals of all drafters → the arrays that trees are built from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lookfar.core.arrays import stack
from lookfar.core.plan import RequestPlan, WindowRows
from lookfar.drafters.base import Proposal
from lookfar.errors import RequestError
from lookfar.retrieval.recycle_table import NO_RECYCLING, SAMPLED_TOP_K, RecycleTable
from lookfar.speculation.acceptance import AcceptanceModel
from lookfar.speculation.interface import SpeculatedRequest
from lookfar.speculation.tree_builder import BuildInputs, DraftArrays, NoiseArrays, RootArrays

NO_PROPOSAL = Proposal()


@dataclass(slots=True)
class RequestProposals:
    """What the drafters of one request propose, and the acceptance model that judges it."""

    place: int  # of the request in the batch
    request: SpeculatedRequest
    proposals: list[Proposal]  # by drafter
    sources: list[int]  # by drafter: its index among the sources of the acceptance model
    table: RecycleTable
    acceptance: AcceptanceModel

    @property
    def windows(self) -> tuple[WindowRows, ...]:
        return tuple(proposal.window for proposal in self.proposals)


def propose(place: int, request: SpeculatedRequest, rows: RequestPlan) -> RequestProposals | None:
    """Ask the drafters of a request; None if nothing can be drafted in this step."""
    # The bonus token is always emitted, so a deeper draft could never be accepted.
    limit = request.remaining - 1
    speculation = request.speculation
    if not rows.complete or limit < 1 or not speculation.drafters:
        return None
    names: list[str] = []
    proposals, sources, table = [], [], NO_RECYCLING
    for drafter in speculation.drafters:
        proposal = drafter.propose(request.ids, limit)
        proposals.append(proposal)
        if proposal.table is not None:
            table = proposal.table
        if len(proposal.drafts):
            _check(drafter.name, proposal)
        elif proposal.table is not None:
            sources.append(-1)
            continue
        if drafter.name not in names:
            names.append(drafter.name)
        sources.append(names.index(drafter.name))
    samples = request.sampler.random is not None
    acceptance = speculation.state.acceptance(tuple(names), table is not NO_RECYCLING, samples)
    return RequestProposals(place, request, proposals, sources, table, acceptance)


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


def collect(members: Seq[RequestProposals], max_depth: int | None) -> BuildInputs:
    """Put the proposals of requests with one table and one acceptance model into arrays."""
    drafted: list[Proposal] = []
    sources: list[int] = []
    starts = [0]
    runner_ups = np.empty((len(members), SAMPLED_TOP_K - 1), np.int32)
    runner_ups.fill(-1)
    runner_up_logits = np.empty(runner_ups.shape, np.float32)
    for i, member in enumerate(members):
        starts.append(starts[-1])
        for proposal, source in zip(member.proposals, member.sources, strict=True):
            if len(proposal.runner_ups):
                count = min(len(proposal.runner_ups), SAMPLED_TOP_K - 1)
                runner_ups[i, :count] = proposal.runner_ups[:count]
                runner_up_logits[i, :count] = proposal.runner_up_logits[:count]
            if count := len(proposal.drafts):
                drafted.append(proposal)
                sources += [source] * count
                starts[-1] += count
    about = []
    for member in members:
        ids, deepest = member.request.ids, member.request.remaining - 1
        before = ids[-2] if len(ids) > 1 else -1
        about.append((before, ids[-1], min(deepest, max_depth or deepest), member.place))
    roots = RootArrays(np.array(about, dtype=np.int32), runner_ups, runner_up_logits)
    drafts = DraftArrays(
        stack([proposal.drafts for proposal in drafted]),
        np.concatenate([proposal.scores for proposal in drafted]) if drafted else NO_PROPOSAL.scores,
        np.concatenate([proposal.weights for proposal in drafted]) if drafted else NO_PROPOSAL.weights,
        np.array(sources, np.int32),
        np.array(starts, np.int32),
    )
    return BuildInputs(
        drafts, roots, known_noise([member.request for member in members]), members[0].table, members[0].acceptance
    )


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
