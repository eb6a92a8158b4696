"""The decoding loop for `model.generate`, for one call or for a model.

transformers prepares everything (inputs, processors, criteria, caches) and calls a decoding loop; for greedy search and
sampling this is `_sample`. `generate` replaces it, either for one call (`custom_generate=lookfar.generate`) or for a
model (`lookfar.accelerate`). Calls that it cannot decode exactly go to transformers' own loop.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lookfar.drafters.registry import StrategySpec, parse_strategy
from lookfar.engine.outputs import StepOutput
from lookfar.errors import FirstPassError, RequestError, first_sentence
from lookfar.integrations.transformers.call import GenerateCall, UnsupportedCall
from lookfar.integrations.transformers.results import LockstepStreamer, build_result
from lookfar.integrations.transformers.state import ATTRIBUTE, ModelState, state_of
from lookfar.lm import OnStep
from lookfar.models.stock_loop import is_accelerated, stock_attributes, stock_loop
from lookfar.sampling.params import ACCELERATED_MODES
from lookfar.speculation.row_budget import Budget, check_budget

on_step_of_call: ContextVar[OnStep | None] = ContextVar("on_step_of_call", default=None)


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    strategy: StrategySpec = None,
    budget: Budget = None,
    inputs_tensor: torch.Tensor | None = None,
    **inputs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode a call of `model.generate(**inputs, custom_generate=lookfar.generate)`.

    `strategy` and `budget` can be given to `model.generate` beside it. `inputs_tensor` is what an encoder has read;
    transformers passes it to loops that name it.
    """
    streamer = streamer or _streamer_of_caller()
    mode = generation_config.get_generation_mode()
    prepared = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        **({"synced_gpus": synced_gpus} if synced_gpus else {}),
        **({"streamer": streamer} if streamer is not None else {}),
    }
    if mode not in ACCELERATED_MODES:
        loop = GENERATION_MODES_MAPPING[mode]
        if not hasattr(model, loop):
            raise RequestError(
                f"{mode.value} is not part of transformers any more: use custom_generate={loop!r} for it."
            )
        return getattr(type(model), loop)(model, input_ids, **prepared, **inputs)
    state = state_of(model)
    call = GenerateCall(model, input_ids, logits_processor, stopping_criteria, generation_config, inputs, inputs_tensor)
    try:
        if synced_gpus:
            raise UnsupportedCall("synced_gpus is set")
        call.check_model()
        lm = state.lm_of(model)
        call.check(lm)
        requests = call.requests(lm, *lm.speculation_for(strategy, budget))
        if len(requests) > lm.engine.scheduler.max_batch:
            lm.driver.call(lambda: lm.engine.widen(len(requests)))
        try:
            results = lm.run(requests, _observers(call, streamer))
        except FirstPassError as error:  # nothing was decoded yet
            raise UnsupportedCall(lm.engine.runner.model.first_pass_refused or first_sentence(error)) from None
    except UnsupportedCall as reason:
        state.stats = []
        state.warn(model, str(reason))
        return stock_loop(model)(model, input_ids, **prepared, **inputs)
    if streamer is not None:
        streamer.end()
    state.stats = [result.stats for result in results]
    return build_result(call, requests, results)


def _observers(call: GenerateCall, streamer: BaseStreamer | None) -> OnStep | None:
    """Return a function that passes each step on to the streamer and to the observer of this call."""
    watch = on_step_of_call.get()
    if streamer is None:
        return watch
    lockstep = LockstepStreamer(streamer, call.batch, call.pad_token)

    def both(output: StepOutput) -> None:
        lockstep(output)
        if watch is not None:
            watch(output)

    return both


def accelerate(
    model: PreTrainedModel, strategy: StrategySpec = "auto", budget: Budget = None, **options: Any
) -> PreTrainedModel:
    """Make `model.generate(…)` itself fast; `restore` undoes it. Options as for `lookfar.LM`.

    The model becomes an instance of a subclass of its class whose decoding loop is lookfar's. Weights, configuration
    and everything else stay as they are; copies and pickles of it are ordinary models again.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise RequestError(f"accelerate takes a transformers model that can generate, not {type(model).__name__}.")
    parse_strategy(strategy)  # raise errors now, not at the first call
    check_budget(budget)
    vars(model)[ATTRIBUTE] = ModelState({"strategy": strategy, "budget": budget, **options})
    if not is_accelerated(model):
        stock = type(model)
        model.__class__ = type(stock.__name__, (stock,), {**stock_attributes(stock), "_sample": generate})
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `accelerate` and drop the lookfar state of the model."""
    vars(model).pop(ATTRIBUTE, None)
    if is_accelerated(model):
        model.__class__ = type(model)._lookfar_stock
    return model


def _streamer_of_caller() -> BaseStreamer | None:
    """Return the streamer of the calling `generate`: transformers does not pass it to a custom loop.

    It is read from the local variables of `generate`, two frames up; without it, a reader would wait for ever.
    """
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    found = caller.f_locals.get("streamer") if caller is not None else None
    return found if isinstance(found, BaseStreamer) else None
