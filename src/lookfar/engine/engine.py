"""The engine: one step at a time, without threads and without locks.

A step runs the model once for a batch of requests: schedule, draft, run, verify, commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count

from lookfar.core.torch_threads import one_torch_thread
from lookfar.engine.batch import StepBatch
from lookfar.engine.costs import known_costs, save_refined_costs
from lookfar.engine.counts import EngineCounts
from lookfar.engine.first_pass import FirstPassStep
from lookfar.engine.limits import check_request
from lookfar.engine.outputs import StepOutput
from lookfar.engine.prior import PriorBuilder
from lookfar.engine.request import Request, RequestState
from lookfar.engine.scheduler import Scheduler
from lookfar.engine.verify import verify
from lookfar.errors import ConfigError, ModelError
from lookfar.kvcache.prefix_cache import PrefixCache
from lookfar.models.weight_changes import ModelChange
from lookfar.runners.base import ModelRunner
from lookfar.speculation.cost_curve import CostCurve
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.speculator import Speculator

RESHAPED = "The model's precision, device or vocabulary was changed while this request was running: send it again."


@dataclass(frozen=True)
class EngineConfig:
    """The limits of an engine."""

    max_batch: int = 8  # requests that are decoded at once
    max_length: int | None = None  # of a text, prompt included; None: the model's own limit
    prefill_chunk: int = 512  # prompt rows of one step

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")


class Engine:
    """Decodes requests on one model. Not thread-safe: `Driver` lets several threads use one."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig | None = None,
        draft_state: DraftState | None = None,
        costs: CostCurve | None = None,
    ) -> None:
        self.runner = runner
        self.config = config or EngineConfig()
        self.draft_state = draft_state or DraftState(runner.model.vocab_size)  # of requests without one of their own
        self.cache = runner.create_cache()
        self.scheduler = Scheduler(self.cache, self.config.max_batch, self.config.prefill_chunk)
        self.speculator = Speculator(costs)
        self.counts = EngineCounts()
        self.prior_context: Seq[int] | None = None  # the text before single tokens; None: there is no prior
        self._priors: PriorBuilder | None = None
        self.is_rehearsed = False  # whether a warm-up has decoded something with the model as it is
        self._handles = count()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[StepOutput]:
        """Run one forward pass and return its outputs; an empty list if there is no work.

        Errors are returned in the outputs of the requests that they end. `meanwhile` is called while the device works;
        it must not fail.
        """
        batch = self.scheduler.schedule(self.runner.limits)
        if not batch.requests:
            return self.scheduler.take_ended()
        alone = self.runner.limits.own_threads and not any(request.runs_own_code for request in batch.requests)
        with one_torch_thread() if alone else nullcontext():
            return self._run(batch, meanwhile)

    def _run(self, batch: StepBatch, meanwhile: Callable[[], None]) -> list[StepOutput]:
        if batch.is_first_pass:
            meanwhile()  # it takes long
        try:
            runner = FirstPassStep(batch.requests, self.runner.model) if batch.is_first_pass else self.runner
        except Exception as error:
            return self.scheduler.fail(batch, error)
        try:
            plan = self.speculator.plan(batch, self.runner.limits)
            plan.shared = self.scheduler.is_shared
            pending = runner.launch(plan, self.cache)
            self.speculator.learn()  # from the last step, while the device works
            meanwhile()
            result = pending.result()
            walks = verify(batch.requests, plan, result)
            self.speculator.observe(walks, result)
            self.counts.add(plan, walks)
            return self.scheduler.commit(batch, plan, walks, result)
        except BaseException as error:
            return self.scheduler.recover(batch, error, retry=isinstance(error, Exception))

    def add(self, request: Request, index: int = 0, every_step: bool = True) -> int:
        """Add a request and return its handle; `index` is its place among the requests of one call.

        Without `every_step` it has one output, the last one.
        """
        self.check(request)
        if self.scheduler.is_idle:
            self.refresh()
        draft_state = request.draft_state or self.draft_state
        draft_state.fit(self.runner.model.vocab_size)
        if request.strategies and self.priors is not None:
            draft_state.sources.use_prior(self.priors.prior)
        state = RequestState(request, next(self._handles), index, draft_state, self.runner.model)
        state.every_step = every_step
        if self.needs_costs(request):
            self.find_costs()
        self.scheduler.add(state)
        return state.handle

    def needs_costs(self, request: Request) -> bool:
        """Whether the rows of a request are chosen by the cost curve."""
        return request.budget == "auto" and bool(request.strategies)

    def find_costs(self) -> None:
        """Read or measure the cost curve, unless it is known already."""
        if self.speculator.costs is None:
            self.speculator.use_costs(known_costs(self.runner, self.cache, self.scheduler.max_batch))

    @property
    def priors(self) -> PriorBuilder | None:
        """The prior of the model's recycle tables, as far as it was computed."""
        if self._priors is None and self.prior_context is not None:
            self._priors = PriorBuilder(self.runner, self.prior_context)
        return self._priors

    def prepare_sources(self) -> None:
        """Make the recycle table, with the prior as far as it is known, before a request needs it."""
        if self.priors is not None:
            self.draft_state.sources.use_prior(self.priors.prior)
        self.draft_state.sources.prepare()

    def extend_prior(self) -> bool:
        """Compute a part of the prior, if nothing is running; returns whether there is more to compute now.

        Captured steps use the engine's KV cache, so they wait while it keeps a text for later requests.
        """
        keeps_text = self.runner.limits.captured and self.cache.keeps_texts
        if self.priors is None or not self.priors.has_work or self.cache.order or keeps_text:
            return False
        self.priors.step(self.cache, self.scheduler.max_batch)
        return self.priors.has_work

    def capture_wanted(self) -> bool:
        """Capture a step that larger ones have stood in for; False if there is none left.

        Only while nothing else uses the model: a capture changes its layers for a moment.
        """
        shape = self.runner.next_wanted()
        if shape is not None:
            self.runner.capture(self.cache, shape)
        return self.runner.next_wanted() is not None

    def refresh(self, everything: bool = False) -> None:
        """Follow changes of the model, such as edited weights or another precision: called when nothing is running.

        `everything` also drops copies of weights that seem unchanged. Requests that are running go on with the new
        weights; they end with an error if their KV does not fit them.
        """
        change = self.runner.refresh(everything)
        self.is_rehearsed = self.is_rehearsed and change is ModelChange.NONE
        if change is not ModelChange.NONE:
            self._forget_prefixes()
            self._priors = None
        if change is ModelChange.WEIGHTS:
            self.cache.forget()
        elif change is ModelChange.SHAPE:
            self.scheduler.end_all(ModelError(RESHAPED))
            self.cache.clear()
            self.speculator.costs = None

    def share_prefixes(self, max_bytes: int) -> None:
        """Keep the KV of past texts, up to `max_bytes`, for requests with `reuse` whose prompts begin like them."""
        if self.cache.shares_prefixes and max_bytes:
            self.scheduler.reuse.prefixes = PrefixCache(max_bytes)

    def _forget_prefixes(self) -> None:
        if self.scheduler.reuse.prefixes is not None:
            self.scheduler.reuse.prefixes.clear()

    def cancel(self, handle: int) -> None:
        """Drop a request; nothing happens if it has ended."""
        self.scheduler.cancel(handle)
        self.settle()

    def pause(self, handle: int) -> None:
        """Stop decoding a request until `resume`. It gives up its place in the KV cache and loses nothing."""
        self.scheduler.pause(handle)

    def resume(self, handle: int) -> None:
        """Go on with a paused request."""
        self.scheduler.resume(handle)

    def abort(self, error: BaseException) -> list[StepOutput]:
        """End all requests with an error."""
        return self.scheduler.abort(error)

    def settle(self) -> None:
        """Finish learning from the last steps, and keep a refined cost curve: called when there is time."""
        self.speculator.settle()
        if self.scheduler.is_idle:
            self.runner.model.forget()
        if self.speculator.costs is not None:
            save_refined_costs(self.runner, self.speculator.costs, self.speculator.experience)
        if self._priors is not None:
            self._priors.save()

    def widen(self, requests: int) -> None:
        """Raise `max_batch` to at least `requests`."""
        self.scheduler.max_batch = max(self.scheduler.max_batch, requests)

    @property
    def max_length(self) -> int | None:
        """The most tokens of a text, prompt included; None: no limit."""
        limits = [self.config.max_length, self.runner.model.support.max_positions]
        return min((limit for limit in limits if limit is not None), default=None)

    def check(self, request: Request) -> None:
        """Refuse a request that cannot fit, before anything is decoded."""
        check_request(request, self.runner, self.max_length)

    def can_speculate(self, request: Request) -> bool:
        """Whether drafts for this request are verified exactly; transformers decodes other requests."""
        support = self.runner.model.support
        return support.drafts and (support.tree_limit is None or request.max_positions <= support.tree_limit)
