"""Verification: walk down the draft tree from the last token while a child is the model's choice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch

from lookfar.core.arrays import Int32s, Ints
from lookfar.core.jit import jit
from lookfar.core.plan import COMPLETE, FIRST_NODE, NUM_NODES, NUM_PENDING, RequestPlan, StepPlan
from lookfar.core.tree import ROOT, DraftTree
from lookfar.engine.request import FinishReason, RequestState
from lookfar.engine.stopping import finish_reason
from lookfar.runners.base import StepResult
from lookfar.sampling.sampler import check_sampled, choose_rows
from lookfar.speculation.interface import Walks

ROWS_TOGETHER = 64  # sampled in one call, which copies their scores a few times


@dataclass(slots=True, eq=False)
class Walk:
    """The accepted nodes of a request's tree, and the tokens that they emit, followed by the bonus token."""

    nodes: list[int]
    tokens: list[int]
    finish_reason: FinishReason | None = None
    sampling_seconds: float = 0.0  # spent in logits processors and sampling on the host


def walk(
    tree: DraftTree,
    choose: Callable[[int, list[int]], int],
    ends: Callable[[list[int]], FinishReason | None] = lambda _: None,
) -> Walk:
    """Walk down a tree; `choose(node, tokens)` is the model's choice after a node that was reached over `tokens`.

    Nothing is chosen after a token with which the text `ends`.
    """
    node = ROOT
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(node, tokens)
        tokens.append(token)
        reason = ends(tokens)
        child = tree.child(node, token) if reason is None else None
        if child is None:
            return Walk(nodes, tokens, reason)
        nodes.append(child)
        node = child


def verify(requests: Seq[RequestState], plan: StepPlan, result: StepResult) -> Walks[Walk]:
    """Walk the tree of every request and append what it emits; a request that prefills has no walk.

    An error of a request's own code (a logits processor, a stopping criterion, a grammar) fails that request only.
    """
    sampling = _sample_rows(requests, plan, result)
    all_tokens, all_nodes, ends, last = _walk_all(plan, result)
    found_all: list[Walk | None] = []
    start, now, sampling_seconds = 0, perf_counter(), 0.0
    for place, (request, end) in enumerate(zip(requests, ends, strict=True)):
        found = None
        if end > start and request.error is None:
            try:
                if request.has_rules:
                    found = _walk_with_rules(place, request, plan.requests[place], result)
                    _set_last(last, place, found)
                    now = perf_counter()
                else:
                    tokens = all_tokens[start:end]
                    if request.samples_by_row:
                        check_sampled(tokens)
                    found = Walk(all_nodes[start : end - 1], tokens)
                    if len(request.ids) + len(tokens) >= request.max_length or not request.stop_ids.isdisjoint(tokens):
                        _end_at_limit(request, found)
                        _set_last(last, place, found)
                if sampling:
                    found.sampling_seconds = sampling.get(place, found.sampling_seconds)
                sampling_seconds += found.sampling_seconds
                request.accept(found.tokens, found.finish_reason, now)
            except BaseException as error:
                request.fail(error)
                found = None
        if found is None:
            last[:, place] = ROOT
        found_all.append(found)
        start = end
    walks: Walks[Walk] = Walks(found_all)
    walks.sampling_seconds, walks.last = sampling_seconds, last
    return walks


def _walk_all(plan: StepPlan, result: StepResult) -> tuple[list[int], list[int], list[int], Int32s]:
    """Walk the trees of all requests, as `walk_trees` does; without any tree there is one token for each request."""
    if plan.trees.columns.shape[1]:
        emitted, nodes, ends, ended = walk_trees(tuple(plan.flat), result.starts, result.choices)
        return emitted.tolist(), nodes.tolist(), ends.tolist(), ended
    choices = result.choices.tolist()
    requests = zip(result.starts.tolist(), plan.num_pending, plan.complete, strict=True)
    tokens = [choices[start + pending - 1] for start, pending, complete in requests if complete]
    last: Int32s = np.full((2, plan.batch), ROOT, np.int32)
    last[1, plan.complete] = tokens
    return tokens, [], [*accumulate(plan.complete)], last


def _set_last(last: Int32s, place: int, found: Walk) -> None:
    """Note where a walk ended that is not that of `walk_trees`."""
    last[:, place] = found.nodes[-1] if found.nodes else ROOT, found.tokens[-1]


def _sample_rows(requests: Seq[RequestState], plan: StepPlan, result: StepResult) -> dict[int, float]:
    """Sample the tokens after all rows of requests that can; they replace the most likely tokens.

    Returns the seconds that it took for each request.
    """
    seconds: dict[int, float] = {}
    if not any(by_row := [request.samples_by_row and request.error is None for request in requests]):
        return seconds
    if result.sampled is not None:
        take_sampled(result.choices, result.sampled, result.starts, plan.flat.about, np.array(by_row))
        return seconds
    alike: dict[Hashable, list[int]] = {}  # requests whose rows are sampled in one call
    for place, request in enumerate(requests):
        if by_row[place] and plan.complete[place]:
            own = request.sampler.fingerprint
            alike.setdefault(place if own is None else (own, request.sampler.device), []).append(place)
    for places in (few for group in alike.values() for few in _in_parts(group, plan)):
        started = perf_counter()
        try:
            _sample_together(places, requests, plan, result)
            seconds |= dict.fromkeys(places, (perf_counter() - started) / len(places))
        except BaseException as error:
            for place in places:
                requests[place].fail(error)
    return seconds


def _in_parts(places: Seq[int], plan: StepPlan) -> Iterator[list[int]]:
    """Divide requests by `ROWS_TOGETHER`."""
    part: list[int] = []
    rows = 0
    for place in places:
        own = 1 + len(plan.requests[place].tree)
        if part and rows + own > ROWS_TOGETHER:
            yield part
            part, rows = [], 0
        part.append(place)
        rows += own
    yield part


def _sample_together(places: Seq[int], requests: Seq[RequestState], plan: StepPlan, result: StepResult) -> None:
    """Sample the tokens after all rows of some requests with the same logits processors."""
    chosen: list[Ints] = []
    logits: list[torch.Tensor] = []
    noise: list[torch.Tensor] = []
    for place in places:
        rows = plan.requests[place]
        of_request = np.arange(rows.last_row, rows.last_row + 1 + len(rows.tree))
        chosen.append(of_request + int(result.starts[place]))
        logits.append(result.logits(place, of_request))
        noise += requests[place].sampler.noise_of(rows.tree.depths, logits[-1].shape[-1])
    processors = requests[places[0]].sampler.processors
    result.choices[np.concatenate(chosen)] = choose_rows(processors, torch.cat(logits), noise)


@jit
def take_sampled(choices, sampled, starts, about, wanted):  # type: ignore[no-untyped-def]
    """Choose the sampled tokens after the last token and the draft nodes of some requests."""
    for place in range(len(about)):
        if wanted[place] and about[place, COMPLETE]:
            last = starts[place] + about[place, NUM_PENDING] - 1
            for row in range(last, last + 1 + about[place, NUM_NODES]):
                choices[row] = sampled[row]


def _end_at_limit(request: RequestState, found: Walk) -> None:
    """End a walk at the first stop token, or with the last token that the request may emit."""
    tokens, stop_ids = found.tokens, request.stop_ids
    if not stop_ids.isdisjoint(tokens):
        end = next(i for i, token in enumerate(tokens) if token in stop_ids)
        del tokens[end + 1 :], found.nodes[end:]
        found.finish_reason = "stop"
    else:
        found.finish_reason = "length"


def _walk_with_rules(place: int, request: RequestState, rows: RequestPlan, result: StepResult) -> Walk:
    """Walk with stopping criteria, or with logits processors that look at the text that leads to a node.

    Such processors run for one node after the other, so only reached nodes cost.
    """
    started, first = perf_counter(), int(result.starts[place])
    one_by_one = not (request.sampler.is_argmax or request.samples_by_row)

    def choose(node: int, tokens: list[int]) -> int:
        row = rows.node_row(node)
        if one_by_one:
            result.choices[first + row] = request.sampler.choose(tokens, result.logits(place, np.array([row]))[0])
        token = int(result.choices[first + row])
        if request.samples_by_row:
            check_sampled([token])  # before a criterion sees it
        return token

    found = walk(rows.tree, choose, lambda tokens: finish_reason(request, tokens))
    if one_by_one:
        found.sampling_seconds = perf_counter() - started
    return found


@jit
def walk_trees(plan, starts, choices):  # type: ignore[no-untyped-def]
    """Walk the trees of all requests that emit tokens, down the chosen tokens.

    Returns the emitted tokens of all requests, the nodes that hold them (the last one of a request is no node), where
    those of each request end, and the last node and token of each (`Walks`).
    """
    about, _, nodes = plan
    most = nodes.shape[1] + len(about)
    tokens, accepted = np.empty(most, np.int32), np.empty(most, np.int32)
    ends, last, count = np.empty(len(about), np.int32), np.full((2, len(about)), ROOT, np.int32), 0
    for i in range(len(about)):
        own = about[i]
        if own[COMPLETE]:
            first_row, first, end = starts[i] + own[NUM_PENDING], own[FIRST_NODE], own[FIRST_NODE] + own[NUM_NODES]
            node = -1
            while True:
                token = choices[first_row + node]
                last[0, i], last[1, i] = node, token
                tokens[count] = token
                child = first + max(node, 0)
                while child < end and not (nodes[1, child] == node and nodes[0, child] == token):
                    child += 1
                node = child - first
                accepted[count] = node
                count += 1
                if child == end:
                    break
        ends[i] = count
    return tokens[:count], accepted[:count], ends, last
