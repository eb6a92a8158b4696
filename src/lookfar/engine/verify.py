"""Verification: walk down the draft tree from the last token while a child is the model's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from lookfar.core.arrays import Ints
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import ROOT, DraftTree
from lookfar.engine.request import FinishReason, RequestState
from lookfar.engine.stopping import finish_reason
from lookfar.runners.base import StepResult
from lookfar.sampling.sampler import check_sampled


@dataclass
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


def verify(requests: Seq[RequestState], plan: StepPlan, result: StepResult) -> list[Walk | None]:
    """Walk the tree of every request and append what it emits; a request that prefills has no walk.

    An error of a request's own code (a logits processor, a stopping criterion, a grammar) fails that request only.
    """
    walks: list[Walk | None] = []
    for place, (request, rows) in enumerate(zip(requests, plan.requests, strict=True)):
        walks.append(None)
        if request.error is not None or not rows.complete:
            continue
        try:
            accepted = walks[-1] = _walk_request(place, request, rows, result)
        except BaseException as error:
            request.fail(error)
        else:
            request.accept(accepted.tokens, accepted.finish_reason)
    return walks


def _walk_request(place: int, request: RequestState, rows: RequestPlan, result: StepResult) -> Walk:
    started, chosen, sampler = perf_counter(), result.choices[place], request.sampler

    def ends(tokens: list[int]) -> FinishReason | None:
        return finish_reason(request, tokens)

    if not sampler.is_argmax:
        sampled = _sample_rows(place, request, rows, result)
        if sampled is None:
            found = walk(rows.tree, _choose_one_by_one(place, request, rows, result), ends)
        else:
            chosen[rows.last_row : rows.node_row(len(rows.tree))] = sampled
            found = walk(rows.tree, lambda node, _: int(chosen[rows.node_row(node)]), ends)
        if not result.sampled:
            found.sampling_seconds = perf_counter() - started
        return found
    return walk(rows.tree, lambda node, _: int(chosen[rows.node_row(node)]), ends)


def _choose_one_by_one(
    place: int, request: RequestState, rows: RequestPlan, result: StepResult
) -> Callable[[int, list[int]], int]:
    """Return a function that chooses after one node, with the text that leads there: only reached nodes cost."""

    def choose(node: int, tokens: list[int]) -> int:
        row = rows.node_row(node)
        token = request.sampler.choose(tokens, result.logits(place, np.array([row]))[0])
        result.choices[place][row] = token
        return token

    return choose


def _sample_rows(place: int, request: RequestState, rows: RequestPlan, result: StepResult) -> Ints | None:
    """Return the tokens sampled after the last token and all nodes; None if they have to be sampled one by one.

    On an accelerator one call for all rows is faster than several calls that each wait for the device. On a CPU it is
    the other way round: most rows are never reached, and sorting a vocabulary takes milliseconds.
    """
    sampler = request.sampler
    if not sampler.is_row_parallel or sampler.device.type == "cpu":
        return None
    first, last = rows.last_row, rows.node_row(len(rows.tree))
    if result.sampled:
        sampled = result.sampled[place][first:last]
        check_sampled(sampled)
        return sampled
    return sampler.choose_rows(rows.tree.depths, result.logits(place, np.arange(first, last)))
