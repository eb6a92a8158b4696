"""Warming up an engine: what first requests would otherwise wait for, as a list of short tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from lookfar.core.progress import progress_bar
from lookfar.drafters.recycle import Recycle
from lookfar.engine.costs import MEASURED_LENGTH, MEASURING
from lookfar.engine.driver import Driver
from lookfar.engine.engine import Engine, EngineConfig
from lookfar.engine.request import Request, RequestState
from lookfar.engine.scheduler import Scheduler
from lookfar.retrieval.recycle_table import SAMPLED_TOP_K, TOP_K
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.draft_state import DraftState

EXAMPLE_LENGTH = 12  # tokens of a prompt, and of its answer, that are decoded
PRIOR_SECONDS = 3.0  # for the prior: all of a small model's on a GPU, its most frequent tokens on a CPU
LENGTH = 1024  # tokens of a text that captured steps have room for, unless another length is given


@dataclass(frozen=True)
class WarmupTask:
    """A part of a warm-up, to be run between two steps."""

    text: str  # what it does
    run: Callable[[], None]


def extend_prior(driver: Driver) -> None:
    """Compute the prior of the recycle table for a while, or to its end; requests run in between."""
    priors, end = driver.call(lambda: driver.engine.priors), perf_counter() + PRIOR_SECONDS
    if priors is None or not priors.has_work:
        return
    before, more = priors.prior.count, True
    with progress_bar("Predicting after single tokens", len(priors.prior.ids), before) as advance:
        while more and perf_counter() < end:
            more = driver.call(driver.engine.extend_prior)
            advance(priors.prior.count - before)
            before = priors.prior.count
    driver.call(priors.save)


def warm_up(
    driver: Driver, examples: Seq[Request], requests: int, length: int | None = None, prior: bool = True
) -> None:
    """Warm up the engine of a driver, task by task: its requests run in between. Computes some of the prior, too."""
    engine = driver.engine
    EngineConfig(requests, length)  # refuses what is no number of requests or tokens
    length = min(length or LENGTH, engine.max_length or length or LENGTH)
    tasks = driver.call(lambda: warmup_tasks(engine, examples, requests, length))
    if tasks:
        with progress_bar("Warming up", len(tasks)) as advance:
            for task in tasks:
                with progress_bar(task.text):
                    driver.call(task.run)
                advance(1)
    if prior:
        extend_prior(driver)
    if any(isinstance(strategy, Recycle) for example in examples for strategy in example.strategies):
        driver.call(engine.prepare_sources)


def example_prompt(engine: Engine) -> list[int]:
    """Return token ids with repetitions, so that there is something to draft, of at most half the model's positions."""
    most = min(engine.max_length or LENGTH, 2 * EXAMPLE_LENGTH) // 2
    return [token % 5 % engine.runner.model.vocab_size for token in range(max(most, 1))]


def warmup_tasks(engine: Engine, examples: Seq[Request], requests: int, length: int) -> list[WarmupTask]:
    """Return what is left to do until `requests` at once, of up to `length` tokens, run at full speed.

    `examples` are requests like those to come: they are decoded, and their results thrown away.
    """
    if engine.scheduler.is_idle:
        engine.refresh()
    tasks = []
    if engine.runner.limits.captured:
        positions = length + max((request.max_draft_rows for request in examples), default=0)
        positions = max(positions, MEASURED_LENGTH)  # so that measuring does not replace the KV cache
        engine.cache.reserve(requests, positions, most=max(requests, engine.scheduler.max_batch), keep=True)
    if engine.runner.model.packing_left:
        tasks.append(WarmupTask("Packing weights", engine.runner.model.pack))
    if engine.speculator.costs is None and any(engine.needs_costs(request) for request in examples):
        tasks.append(WarmupTask(MEASURING, engine.find_costs))
    for shape in engine.runner.missing(engine.cache, requests, _predictions(engine, examples)):
        text = f"Capturing steps of {shape.rows} rows for up to {shape.requests} requests"
        tasks.append(WarmupTask(text, partial(engine.runner.capture, engine.cache, shape)))
    if not engine.is_rehearsed and examples:
        tasks.append(WarmupTask("Decoding a few tokens", partial(rehearse, engine, examples)))
    return tasks


def _predictions(engine: Engine, examples: Seq[Request]) -> list[int]:
    """Return the numbers of predictions that steps of such requests ask for."""
    found = set()
    for request in examples:
        wanted = RequestState(request, -1, 0, _no_drafts(engine), engine.runner.model).speculation.wants_predictions
        sampled = request.sampling.random is not None
        found.add((SAMPLED_TOP_K if sampled else TOP_K) if wanted else 0)
    return sorted(found)


def rehearse(engine: Engine, examples: Seq[Request]) -> None:
    """Decode requests on an engine's model and KV cache and leave no other trace.

    This loads or compiles the host's code, packs weights and compiles kernels. While requests run it does nothing:
    they do the same.
    """
    engine.is_rehearsed = True
    if engine.cache.order:
        return
    curve = CostCurve({1: 1.0, 8: 1.0, 16: 16.0}, engine.runner.limits)  # eight rows are worth it
    other = Engine(engine.runner, engine.config, _no_drafts(engine), curve)
    for request in examples:
        other.draft_state.store.add(request.prompt)  # there should be a past text to look into
    other.cache = engine.cache
    together = 2 if engine.cache.slots > 1 else 1
    other.scheduler = Scheduler(engine.cache, together, engine.config.prefill_chunk)
    for request in examples:
        whole = replace(request, draft_state=None)
        if together > 1:  # this one ends first, and the other one moves to its place in the KV cache
            other.add(replace(whole, max_new_tokens=max(whole.max_new_tokens // 2, 1)))
        other.add(whole)
        while other.has_work:
            other.step()
    if engine.cache.shares_prefixes and engine.cache.slots:
        handle, _ = engine.cache.allocate()
        try:
            engine.cache.unpack(handle, engine.cache.pack(handle, 0, 1))
        finally:
            engine.cache.free(handle)
    engine.cache.forget()


def _no_drafts(engine: Engine) -> DraftState:
    return DraftState(engine.runner.model.vocab_size)
