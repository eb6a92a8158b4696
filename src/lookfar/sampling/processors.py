"""Properties of logits processors: which ones read the text, and which ones can be run for one row of a batch alone.

A processor is called once for every emitted token, in order and with the text before it, as `generate` does it. A
single request can therefore use any processor, even one that keeps state. In a batch `generate` calls a processor with
all rows at once; here the requests of a batch advance unevenly, so each of them needs a processor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

# They read nothing but the scores, so all rows of a step can be processed in one call.
HISTORY_FREE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
# They also read the text, treat each row by itself, and keep no state.
ROW_WISE = (
    *HISTORY_FREE,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.WatermarkLogitsProcessor,
    logits_process.WhisperTimeStampLogitsProcessor,
)
# They run the model a second time for every token.
SECOND_FORWARD = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.ClassifierFreeGuidanceLogitsProcessor,
)


def is_history_free(processors: LogitsProcessorList | None) -> bool:
    """Whether the processors read nothing but the scores."""
    return all(type(processor) in HISTORY_FREE for processor in processors or ())


def processors_key(processors: LogitsProcessorList | None) -> Hashable:
    """Return a key that is equal for equal processors; None if a processor has settings that are not numbers."""
    key = []
    for processor in processors or ():
        settings = vars(processor)
        if not all(value is None or isinstance(value, (int, float)) for value in settings.values()):
            return None
        key.append((type(processor), *sorted(settings.items())))
    return tuple(key)


def temperature_of(processors: LogitsProcessorList | None) -> float:
    warpers = [p for p in processors or () if type(p) is logits_process.TemperatureLogitsWarper]
    return float(warpers[0].temperature) if warpers else 1.0


def processors_for_row(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList | None:
    """Return the processors for one row of a batch; None if one of them cannot be run for a row alone.

    A processor can allow it in two ways: with a method `for_row(row)` that returns its equivalent for one row, or with
    an attribute `row_wise = True`, which promises that it treats every row by itself and keeps no state.
    """
    own = LogitsProcessorList()
    for processor in processors:
        if hasattr(processor, "for_row"):
            own.append(processor.for_row(row))
        elif batch == 1 or type(processor) in ROW_WISE or getattr(processor, "row_wise", False):
            own.append(processor)
        elif type(processor) in _SPLIT:
            own.append(_SPLIT[type(processor)](processor, row, batch))
        else:
            return None
    return own


def runs_second_forward(processors: LogitsProcessorList) -> bool:
    return any(isinstance(processor, SECOND_FORWARD) for processor in processors)


def _prefix_function_for_row(processor: Any, row: int, batch: int) -> Any:
    allowed = processor._prefix_allowed_tokens_fn

    def allowed_here(_: int, ids: torch.Tensor) -> list[int]:
        tokens: list[int] = allowed(row, ids)
        return tokens

    return logits_process.PrefixConstrainedLogitsProcessor(allowed_here, 1)


def _penalty_for_row(processor: Any, row: int, batch: int) -> Any:
    ids = processor.encoder_input_ids
    ids = ids[row * len(ids) // batch][None]  # a prompt may have been given several times
    return logits_process.EncoderRepetitionPenaltyLogitsProcessor(1 / processor.penalty, ids)


def _ngrams_for_row(processor: Any, row: int, batch: int) -> Any:
    own = object.__new__(logits_process.EncoderNoRepeatNGramLogitsProcessor)
    own.ngram_size, own.batch_size = processor.ngram_size, 1
    own.generated_ngrams = [processor.generated_ngrams[row * processor.batch_size // batch]]
    return own


_SPLIT: dict[type, Callable[[Any, int, int], Any]] = {
    logits_process.PrefixConstrainedLogitsProcessor: _prefix_function_for_row,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: _penalty_for_row,
    logits_process.EncoderNoRepeatNGramLogitsProcessor: _ngrams_for_row,
}
