"""What is known of logits processors: which look at the text before a place, which at one row alone, and which at more.

A processor is called once for every emitted token, in order and with the text before it, as `generate` does it. One
sequence can therefore use any processor, even one that keeps a state. In a batch `generate` calls a processor with all
sequences at once, which do not advance together here: there each sequence needs a processor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as known

# They look at nothing but the scores, so all places of a step can be processed in one call.
HISTORY_FREE = (
    known.TemperatureLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
    known.TopHLogitsWarper,
    known.MinPLogitsWarper,
    known.TypicalLogitsWarper,
    known.EpsilonLogitsWarper,
    known.EtaLogitsWarper,
    known.SuppressTokensLogitsProcessor,
    known.InfNanRemoveLogitsProcessor,
    known.LogitNormalization,
)
# They look at the text as well, at each row by itself, and remember nothing.
ROW_WISE = (
    *HISTORY_FREE,
    known.MinLengthLogitsProcessor,
    known.MinNewTokensLengthLogitsProcessor,
    known.RepetitionPenaltyLogitsProcessor,
    known.NoRepeatNGramLogitsProcessor,
    known.SequenceBiasLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
    known.ForcedBOSTokenLogitsProcessor,
    known.ForcedEOSTokenLogitsProcessor,
    known.ExponentialDecayLengthPenalty,
    known.SuppressTokensAtBeginLogitsProcessor,
    known.WatermarkLogitsProcessor,
)
# They run the model a second time for every token.
SECOND_FORWARD = (known.UnbatchedClassifierFreeGuidanceLogitsProcessor, known.ClassifierFreeGuidanceLogitsProcessor)


def history_free(processors: LogitsProcessorList | None) -> bool:
    return all(type(processor) in HISTORY_FREE for processor in processors or ())


def fingerprint(processors: LogitsProcessorList | None) -> Hashable:
    """What history-free processors do, as a key; None if plain numbers do not tell it."""
    told = []
    for processor in processors or ():
        facts = vars(processor)
        if not all(fact is None or isinstance(fact, (int, float)) for fact in facts.values()):
            return None
        told.append((type(processor), *sorted(facts.items())))
    return tuple(told)


def temperature_of(processors: LogitsProcessorList | None) -> float:
    warpers = [p for p in processors or () if type(p) is known.TemperatureLogitsWarper]
    return float(warpers[0].temperature) if warpers else 1.0


def of_row(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList | None:
    """The processors for one sequence of a batch; None if one of them cannot be had for a sequence alone.

    Any processor can say how: by a method `for_row(row)` that returns its like for one sequence, or by an attribute
    `row_wise = True`, which promises that it treats every row by itself and remembers nothing.
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


def second_forward(processors: LogitsProcessorList) -> bool:
    return any(isinstance(processor, SECOND_FORWARD) for processor in processors)


def _allowed_of_row(processor: Any, row: int, batch: int) -> Any:
    allowed = processor._prefix_allowed_tokens_fn

    def of_this_row(_: int, ids: torch.Tensor) -> list[int]:
        tokens: list[int] = allowed(row, ids)
        return tokens

    return known.PrefixConstrainedLogitsProcessor(of_this_row, 1)


def _penalty_of_row(processor: Any, row: int, batch: int) -> Any:
    ids = processor.encoder_input_ids
    ids = ids[row * len(ids) // batch][None]  # a prompt may have been given several times
    return known.EncoderRepetitionPenaltyLogitsProcessor(1 / processor.penalty, ids)


def _ngrams_of_row(processor: Any, row: int, batch: int) -> Any:
    own = object.__new__(known.EncoderNoRepeatNGramLogitsProcessor)
    own.ngram_size, own.batch_size = processor.ngram_size, 1
    own.generated_ngrams = [processor.generated_ngrams[row * processor.batch_size // batch]]
    return own


_SPLIT: dict[type, Callable[[Any, int, int], Any]] = {
    known.PrefixConstrainedLogitsProcessor: _allowed_of_row,
    known.EncoderRepetitionPenaltyLogitsProcessor: _penalty_of_row,
    known.EncoderNoRepeatNGramLogitsProcessor: _ngrams_of_row,
}
