"""Generation arguments → the rules of one request, by transformers' own code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMode,
    MaxLengthCriteria,
    MaxTimeCriteria,
)
from transformers.generation.stopping_criteria import StopStringCriteria

from lookfar.errors import RequestError, first_sentence
from lookfar.sampling.argument_checks import check_arguments
from lookfar.sampling.grammar import Grammar, GrammarProcessor
from lookfar.sampling.penalties import EmittedPenalty
from lookfar.sampling.processors import processors_for_row

# Arguments that only make sense when sampling, so that giving one of them asks for it.
SAMPLING_ARGUMENTS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
CONSTRAINTS = ("json_schema", "regex", "grammar")
ROW_WISE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
ACCELERATED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(frozen=True)
class GenerationRules:
    """How the tokens of one request are chosen, and when it ends."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    processors: LogitsProcessorList | None
    criteria: StoppingCriteriaList | None
    do_sample: bool


@dataclass(frozen=True)
class PromptRow:
    """A prompt, and its place among the prompts of a call."""

    ids: list[int]
    row: int = 0
    batch: int = 1
    source: tuple[int, ...] = ()  # what an encoder has read


def generation_rules(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: PromptRow,
    arguments: Mapping[str, Any],
) -> GenerationRules:
    """Return the rules that `model.generate(prompt, **arguments)` would follow; greedy unless sampling is asked for."""
    try:
        rules = _rules(model, tokenizer, prompt, dict(arguments))
    except RequestError:
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, LookupError) as error:
        # transformers checks most arguments when it builds a processor
        raise RequestError(f"A generation argument cannot be used: {first_sentence(error)}.") from None
    processors = processors_for_row(rules.processors or LogitsProcessorList(), prompt.row, prompt.batch)
    if processors is None or not are_row_wise(rules.criteria or (), prompt.batch):
        raise RequestError(
            "A logits processor or stopping criterion of your own may read all prompts at once: give it "
            "`row_wise = True` if it treats each by itself, or decode one prompt at a time."
        )
    return replace(rules, processors=processors or None)


def _rules(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, row: PromptRow, arguments: dict[str, Any]
) -> GenerationRules:
    prompt = row.ids
    if not model.can_generate():  # transformers has no rules for such a model
        if extra := [name for name in arguments if name not in ("max_new_tokens", "do_sample")]:
            raise RequestError(
                f"{extra[0]} needs a model with a generate method, which {type(model).__name__} does not have."
            )
        return GenerationRules(_whole(arguments["max_new_tokens"]), frozenset(), None, None, False)
    check_arguments(arguments, model.config.get_text_config(decoder=True).vocab_size)
    own_criteria = arguments.pop("stopping_criteria", None) or StoppingCriteriaList()
    processors = LogitsProcessorList(arguments.pop("logits_processor", None) or ())
    prefix_function = arguments.pop("prefix_allowed_tokens_fn", None)
    presence, frequency = arguments.pop("presence_penalty", 0.0), arguments.pop("frequency_penalty", 0.0)
    constraint = {name: arguments.pop(name) for name in CONSTRAINTS if arguments.get(name) is not None}
    config = _config(model, len(prompt), arguments)
    if presence or frequency:
        processors.append(EmittedPenalty(len(prompt), presence, frequency))
    if constraint:
        ends = config._eos_token_tensor.tolist() if config._eos_token_tensor is not None else []
        processors.append(GrammarProcessor(Grammar.compile(tokenizer, ends, **constraint)))
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([row.source or prompt], device=model.device),
        prefix_allowed_tokens_fn=prefix_function,
        logits_processor=processors,
        device=str(model.device),
        model_kwargs={},
    )
    if config.stop_strings is not None and tokenizer is None:
        raise RequestError("stop_strings need a tokenizer: pass one to lookfar.LM(model, tokenizer).")
    criteria = model._get_stopping_criteria(
        generation_config=config, stopping_criteria=StoppingCriteriaList(own_criteria), tokenizer=tokenizer
    )
    stop_ids, criteria = split_criteria(criteria)
    new = config.max_length - len(prompt)
    return GenerationRules(new, stop_ids, processors or None, criteria or None, config.do_sample)


def are_row_wise(criteria: Iterable[Any], batch: int) -> bool:
    """Whether stopping criteria can be asked for each row of a batch alone; `row_wise = True` allows it."""
    return batch == 1 or all(type(c) in ROW_WISE_CRITERIA or getattr(c, "row_wise", False) for c in criteria)


def split_criteria(criteria: StoppingCriteriaList) -> tuple[frozenset[int], StoppingCriteriaList]:
    """Return the stop tokens, and the criteria to ask after each token; the length is known from elsewhere."""
    stop_ids: set[int] = set()
    rest = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            stop_ids.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is not MaxLengthCriteria:
            rest.append(criterion)
    return frozenset(stop_ids), rest


def _config(model: PreTrainedModel, prompt_length: int, arguments: dict[str, Any]) -> GenerationConfig:
    if arguments.get("temperature") == 0:  # by convention: the most likely token
        del arguments["temperature"]
        arguments.setdefault("do_sample", False)
    arguments.setdefault("do_sample", any(arguments.get(name) is not None for name in SAMPLING_ARGUMENTS))
    if arguments.get("max_new_tokens") is None and arguments.get("max_length") is not None:
        arguments["max_new_tokens"] = arguments.pop("max_length") - prompt_length
    max_new_tokens = _whole(arguments["max_new_tokens"])
    config, unknown = model._prepare_generation_config(None, **arguments)
    if unknown:
        raise RequestError(f"{next(iter(unknown))} is not a generation argument; see GenerationConfig of transformers.")
    if config.get_generation_mode() not in ACCELERATED_MODES or (config.num_return_sequences or 1) > 1:
        raise RequestError(
            "LM decodes one sequence for each prompt, greedily or by sampling: for beams, assisted decoding or several "
            "sequences use model.generate, perhaps with lookfar.accelerate(model)."
        )
    if config.guidance_scale not in (None, 1, 1.0):
        raise RequestError("guidance_scale runs the model twice for each token: use model.generate for it.")
    model._prepare_special_tokens(config, device=model.device)
    config.max_length = prompt_length + max_new_tokens
    if config.min_new_tokens:
        config.min_length = prompt_length + config.min_new_tokens
    return config


def _whole(max_new_tokens: Any) -> int:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise RequestError(f"max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}.")
    return max_new_tokens
