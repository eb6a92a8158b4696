"""The outputs of a request: of a step, and the last one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy

from lookfar.core.plan import RequestPlan
from lookfar.engine.outputs import RequestResult, StepOutput
from lookfar.engine.request import RequestState


def result_of(state: RequestState) -> RequestResult:
    """Return the result of a finished request."""
    assert state.finish_reason is not None
    sampler = state.sampler
    return RequestResult(state.output, state.finish_reason, state.stats, sampler.scores, sampler.logits, state.exported)


def step_output(
    state: RequestState, accepted: Seq[int], fed: RequestPlan, seconds: float, host_seconds: float
) -> StepOutput:
    """Return the output of a step that emitted tokens."""
    stats, reason = state.stats, state.finish_reason
    return StepOutput(
        state.handle,
        state.index,
        stats.steps,
        state.deliver(),
        tuple(accepted),
        fed,
        seconds,
        host_seconds,
        stats.seconds,
        stats.reused_tokens,
        reason,
        result_of(state) if reason is not None else None,
    )


def last_output(state: RequestState) -> StepOutput:
    """Return the output of a request that ended without emitting anything more."""
    reason = state.finish_reason if state.error is None else None
    result = result_of(state) if reason is not None else None
    tokens = state.deliver() if reason is not None else ()
    return StepOutput(
        state.handle, state.index, state.stats.steps, tokens, finish_reason=reason, result=result, error=state.error
    )


def own_error(error: BaseException) -> BaseException:
    """Return a copy of an error for one of several requests: each caller adds its own traceback when it is raised."""
    try:
        own = copy(error)
    except Exception:
        return error
    own.__cause__ = error
    return own
