"""lookfar as the decoding loop of `model.generate`.

transformers prepares everything (inputs, processors, criteria, caches) and calls a decoding loop; for greedy search and
sampling this is `_sample`. `generate` here stands in for it, either for one call (`custom_generate=lookfar.generate`)
or for a model (`lookfar.accelerate`). What it cannot decode exactly it hands to transformers' own loop.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lookfar.config import Budget, StrategySpec, check_budget, parse_strategy
from lookfar.errors import RequestError
from lookfar.generation import ACCELERATED
from lookfar.integrations.asked import Asked, NotOursError
from lookfar.integrations.attached import PLACE, Attached, attached
from lookfar.integrations.outputs import Lockstep, pad_token, result
from lookfar.lm import settle
from lookfar.loops import is_accelerated, names_of, own_loop


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
    **inputs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The decoding loop: `model.generate(**inputs, custom_generate=lookfar.generate)`.

    `strategy` and `budget` can be given to `model.generate` beside it.
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
    if mode not in ACCELERATED:
        loop = GENERATION_MODES_MAPPING[mode]
        if not hasattr(model, loop):
            raise RequestError(
                f"{mode.value} is not part of transformers any more: use custom_generate={loop!r} for it."
            )
        return getattr(type(model), loop)(model, input_ids, **prepared, **inputs)
    kept = attached(model)
    asked = Asked(model, input_ids, logits_processor, stopping_criteria, generation_config, inputs)
    try:
        if synced_gpus:
            raise NotOursError("several processes run it in step")
        asked.check_model()
        lm = kept.lm_of(model)
        asked.check_call(lm)
        requests = asked.requests(lm, *lm.how_to_guess(strategy, budget))
    except NotOursError as reason:
        kept.stats = []
        kept.warn(model, str(reason))
        return own_loop(model)(model, input_ids, **prepared, **inputs)
    lm.engine.max_batch = max(lm.engine.max_batch, len(requests))
    told = Lockstep(streamer, len(requests), pad_token(asked)) if streamer is not None else None
    done = lm.engine.run(requests, told, kept.on_step)
    settle(requests, [sequence.emitted for sequence in done])
    if streamer is not None:
        streamer.end()
    kept.stats = [sequence.stats for sequence in done]
    return result(asked, done)


def accelerate(
    model: PreTrainedModel, strategy: StrategySpec = "auto", budget: Budget = None, **options: Any
) -> PreTrainedModel:
    """Make `model.generate(…)` itself fast; `restore` undoes it. Options as for `lookfar.LM`.

    The model becomes an instance of a subclass of its class whose decoding loop is lookfar's. Weights, configuration
    and everything else stay as they are; copies and pickles of it are plain models again.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise RequestError(f"accelerate takes a transformers model that can generate, not {type(model).__name__}.")
    parse_strategy(strategy)  # mistakes now, not at the first call
    check_budget(budget)
    vars(model)[PLACE] = Attached({"strategy": strategy, "budget": budget, **options})
    if not is_accelerated(model):
        plain = type(model)
        model.__class__ = type(plain.__name__, (plain,), {**names_of(plain), "_sample": generate})
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model what it was before `accelerate`; whatever lookfar kept for it goes."""
    vars(model).pop(PLACE, None)
    if is_accelerated(model):
        model.__class__ = type(model)._lookfar_plain
    return model


def _streamer_of_caller() -> BaseStreamer | None:
    """transformers does not hand `streamer` on to a custom loop, and whoever reads from it would wait for ever.

    So it is read from `generate`'s own variables, two calls up; if it is not there, there is none.
    """
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    found = caller.f_locals.get("streamer") if caller is not None else None
    return found if isinstance(found, BaseStreamer) else None
