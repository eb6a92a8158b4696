"""Computing the prior of the recycle table: a step with one draft token for every token of the vocabulary in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from lookfar.core.arrays import Ints
from lookfar.core.cache_dir import cache_dir
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import ROOT, DraftTree
from lookfar.engine.costs import MEASURED_LENGTH, own_cache
from lookfar.kvcache.slots import SlotKVCache
from lookfar.models.binding import BoundModel
from lookfar.retrieval.prior import RecyclePrior
from lookfar.runners.base import ModelRunner

ROWS = 96  # of a step that is not captured
SAMPLED_VALUES = 2  # of each weight, to tell models apart


class PriorBuilder:
    """Computes the prior of a runner's model, chunk by chunk, and keeps it in a file."""

    def __init__(self, runner: ModelRunner, context: Seq[int]) -> None:
        self.runner = runner
        self.context: Ints = np.array(context, np.int64)  # before every token
        self.file = prior_file(runner, self.context)
        self.prior = RecyclePrior.read(self.file, runner.model.vocab_size)
        self._saved = self.prior.count

    @property
    def has_work(self) -> bool:
        """Whether there are tokens left. Only models that verify trees have a prior."""
        limits, support = self.runner.limits, self.runner.model.support
        possible = support.trees and not limits.chain and limits.ranks == 1 and not support.encoder_decoder
        return possible and not self.prior.is_complete

    def step(self, cache: SlotKVCache, most: int) -> None:
        """Compute the predictions after the next tokens, as the draft tree of a short text.

        Captured steps belong to the KV cache of the engine, which has at most `most` requests and must hold none now.
        Others have a small one of their own.
        """
        limits, first, before = self.runner.limits, self.prior.count, len(self.context)
        rows = min(limits.rows or ROWS, MEASURED_LENGTH - before, before + len(self.prior.ids) - first)
        if limits.captured:
            cache.reserve(1, MEASURED_LENGTH, most=most, keep=True)
        else:
            cache = own_cache(self.runner, before + rows)
        tokens = np.arange(first, first + rows - before, dtype=np.int32)
        columns = np.stack([tokens, *np.full((4, len(tokens)), [[ROOT], [1], [0], [1]], np.int32)])
        tree = DraftTree(columns, np.ones(len(tokens), np.float32), ("",))
        handle, _ = cache.allocate()
        try:
            plan = RequestPlan(self.context, 0, handle, predict=1, tree=tree)
            result = self.runner.launch(StepPlan([plan], self.prior.ids.shape[1]), cache).result()
        finally:
            cache.free(handle)
        assert result.top_ids is not None
        assert result.top_logits is not None
        start = int(result.starts[0]) + before
        ids, logits = result.top_ids[start : start + len(tokens)], result.top_logits[start : start + len(tokens)]
        sound = np.isfinite(logits).all(1, keepdims=True) & (ids >= 0).all(1, keepdims=True)
        self.prior.append(np.where(sound, ids, tokens[:, None]).astype(np.int32), np.where(sound, logits, 0.0))

    def save(self) -> None:
        """Keep what was computed for later processes."""
        if self.prior.count > self._saved:
            self.prior.write(self.file)
            self._saved = self.prior.count


def prior_context(model: BoundModel, line_break: Seq[int]) -> list[int]:
    """Return the text before single tokens: a line break, or if it is not known the token that texts begin with."""
    config = model.model.config.get_text_config(decoder=True)
    known = [*line_break[-1:], getattr(config, "bos_token_id", None), getattr(config, "eos_token_id", None), 0]
    return [next(token for token in known if isinstance(token, int) and 0 <= token < model.vocab_size)]


def prior_file(runner: ModelRunner, context: Ints) -> Path:
    """Return the file of a model's prior, named by the context, the kind of model and some values of every weight."""
    model, values = runner.model.model, []
    for weight in model.parameters():
        with suppress(Exception):  # weights on other devices, or in a format of their own
            values.append(weight.detach().reshape(-1)[:SAMPLED_VALUES].to("cpu", torch.float32).numpy().tobytes())
    facts = type(model).__name__, runner.model.vocab_size, model.dtype, context.tolist()
    digest = hashlib.sha256(" ".join(map(str, facts)).encode() + b"".join(values))
    return cache_dir() / "priors" / f"{digest.hexdigest()[:16]}.safetensors"
