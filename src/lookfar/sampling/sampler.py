"""From logits to tokens, as `generate` does it: logits processors on the text so far, then argmax or a draw."""

from __future__ import annotations

from collections.abc import Hashable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LogitsProcessorList

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.errors import SamplingError
from lookfar.sampling.noise import RandomStream
from lookfar.sampling.processors import is_history_free, processors_key, temperature_of

NO_TOKEN = -1  # sampled where the scores are NaN


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen."""

    processors: LogitsProcessorList | None = None
    random: RandomStream | None = None  # None: the most likely token
    context: list[int] | None = None  # the prompt as processors and criteria see it, if it differs (padded, say)
    device: torch.device | None = None  # where processors run, if not where the logits are
    keep_scores: bool = False
    keep_logits: bool = False


class Sampler:
    """Chooses the tokens of one request.

    `context` is its text as logits processors and stopping criteria see it, if there are any (`keep_text`: criteria).
    """

    def __init__(self, params: SamplingParams, prompt: Seq[int], keep_text: bool = True) -> None:
        self.params = params
        self.context = list(prompt if params.context is None else params.context)
        self._keep_text = keep_text or bool(params.processors)
        self.num_emitted = 0
        self.scores: list[torch.Tensor] = []  # of each emitted token, if they are kept
        self.logits: list[torch.Tensor] = []
        keeps = params.keep_scores or params.keep_logits
        self.is_argmax = not (params.processors or params.random or keeps)  # of the logits as they are
        self.temperature = temperature_of(params.processors)
        # The tokens after all rows of a step can be sampled in one call.
        self.is_row_parallel = params.random is not None and not keeps and is_history_free(params.processors)
        self.fingerprint: Hashable = processors_key(params.processors) if self.is_row_parallel else None

    @property
    def random(self) -> RandomStream | None:
        return self.params.random

    @property
    def processors(self) -> LogitsProcessorList | None:
        return self.params.processors

    @property
    def device(self) -> torch.device:
        """The device of the sampling noise."""
        assert self.params.random is not None
        return self.params.random.noise.device

    def choose(self, tokens: list[int], logits: torch.Tensor) -> int:
        """Choose the token after the text and `tokens`, given the logits there, [vocabulary]."""
        params = self.params
        logits = logits if params.device is None else logits.to(params.device)
        scores = process(params.processors, self.context + tokens, logits)
        noise = None
        if params.random is not None:
            noise = params.random.at(self.num_emitted + len(tokens), scores.shape[-1])
        if params.keep_scores:
            self.scores.append(scores[0])
        if params.keep_logits:
            self.logits.append(logits.to(torch.float32, copy=True))  # a view would keep all rows of the step
        return int(pick(scores, noise)[0])

    def noise_of(self, depths: Int32s, width: int) -> list[torch.Tensor]:
        """Return the noise for the token after the last one and after nodes of these depths, each [vocabulary]."""
        assert self.params.random is not None
        positions = [self.num_emitted, *(self.num_emitted + depths).tolist()]
        noise = {p: self.params.random.at(p, width) for p in dict.fromkeys(positions)}
        return [noise[position] for position in positions]

    def noise_addresses(self, deepest: int, width: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return where the noise for the next token and those up to `deepest` tokens behind it lies in memory.

        Also returns what has to be kept until it is read.
        """
        assert self.params.random is not None
        return self.params.random.addresses(range(self.num_emitted, self.num_emitted + deepest + 1), width)

    def append(self, tokens: list[int]) -> None:
        """Move on past emitted tokens."""
        self.num_emitted += len(tokens)
        if self._keep_text:
            self.context += tokens
        if self.params.random is not None:
            self.params.random.advance(self.num_emitted)

    def release(self) -> None:
        """Keep no noise for a request that has ended."""
        if self.params.random is not None:
            self.params.random.release()


def greedy(logits: torch.Tensor) -> Ints:
    """Return the most likely token of every row, [batch, rows]; one copy from the device."""
    # float32 even for float64 models: transformers compares the logits in float32.
    chosen: Ints = logits.float().argmax(-1).cpu().numpy().astype(np.int64)
    return chosen


def top_k(logits: torch.Tensor, k: int) -> tuple[Int32s, Floats]:
    """Return the k most likely tokens of every row and their logits, [batch, rows, k], most likely first."""
    values, ids = logits.float().topk(min(k, logits.shape[-1]), -1)
    return ids.to(torch.int32).cpu().numpy(), values.cpu().numpy()


def process(processors: LogitsProcessorList | None, text: Seq[int], logits: torch.Tensor) -> torch.Tensor:
    """Apply logits processors after a text, [vocabulary] → [1, vocabulary]."""
    scores = logits[None].to(torch.float32, copy=True)
    if not processors:
        return scores
    processed: torch.Tensor = processors(torch.tensor([text], device=logits.device, dtype=torch.long), scores)
    return processed


def process_rows(processors: LogitsProcessorList | None, logits: torch.Tensor) -> torch.Tensor:
    """Apply processors that look at nothing but the scores to many rows, [rows, vocabulary]."""
    scores = logits.to(torch.float32, copy=True)
    if not processors:
        return scores
    processed: torch.Tensor = processors(torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device), scores)
    return processed


def choose_rows(processors: LogitsProcessorList | None, logits: torch.Tensor, noise: Seq[torch.Tensor]) -> Ints:
    """Sample a token of each row, [rows, vocabulary], with its own noise; `NO_TOKEN` where the scores are NaN."""
    return sample_with(process_rows(processors, logits), torch.stack(list(noise)))


def noisy_probabilities(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """`softmax(scores) / Exp(1)`; its argmax is the sample."""
    return torch.softmax(scores, -1) / noise.to(scores.device)


def pick(scores: torch.Tensor, noise: torch.Tensor | None) -> Ints:
    """Return the token of each row of scores; with noise it is the one that `torch.multinomial` would draw."""
    if noise is None:
        chosen: Ints = scores.argmax(-1).cpu().numpy()
        return chosen
    sampled = sample_with(scores, noise)
    check_sampled(sampled)
    return sampled


def sample_with(scores: torch.Tensor, noise: torch.Tensor) -> Ints:
    """Return the sampled token of each row; `NO_TOKEN` where the scores are NaN."""
    highest, tokens = noisy_probabilities(scores, noise).max(-1)
    sampled: Ints = tokens.masked_fill(highest.isnan(), NO_TOKEN).cpu().numpy()
    return sampled


def check_sampled(tokens: Ints | Seq[int]) -> None:
    """Refuse samples of scores that are NaN."""
    if min(tokens) < 0:
        raise SamplingError(
            "The scores to sample from are NaN: a logits processor forbids every token, or the logits are NaN."
        )
