"""Steps that transformers runs: the first forward pass of prompts with images, audio, video, or an encoder's source."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch

from lookfar.core.arrays import Ints
from lookfar.core.plan import StepPlan
from lookfar.engine.request import RequestState
from lookfar.kvcache.base import KVCache
from lookfar.models.binding import BoundModel
from lookfar.models.self_check import check_continuation
from lookfar.runners.base import StepResult
from lookfar.sampling.sampler import greedy, top_k


class FirstPassStep:
    """The first forward pass of requests of one call, which runs when the object is made.

    It has the logits after the last token of each prompt, and no others. Nothing is written to the KV cache before
    `launch`, so an error of the pass ends these requests only.
    """

    def __init__(self, requests: Seq[RequestState], model: BoundModel) -> None:
        started = perf_counter()
        passes = [state.request.kv.first for state in requests if state.request.kv.first is not None]
        self.requests = requests
        check = None if model.first_pass_checked else partial(check_continuation, model)
        self.rows = passes[0].call.take([one.row for one in passes], check)
        self.seconds = perf_counter() - started

    def launch(self, plan: StepPlan, cache: KVCache) -> FirstPassStep:
        """Write the KV of the prompts, as a runner does, and give requests what the pass found for them."""
        self.plan = plan
        for state, row in zip(self.requests, self.rows, strict=True):
            cache.write_kv(state.kv, row.kv)
            state.source, state.position_offset = row.source, row.position_offset
        self.last_logits = torch.stack([row.logits for row in self.rows])  # [batch, vocabulary]
        return self

    def result(self) -> StepResult:
        started = perf_counter()
        ends: Ints = np.array(list(accumulate(self.plan.lengths)), np.int64)
        choices: Ints = np.full(ends[-1], -1)
        choices[ends - 1] = greedy(self.last_logits)
        top_ids = top_logits = None
        if self.plan.top_k:
            ids, values = top_k(self.last_logits, self.plan.top_k)
            top_ids = np.zeros((ends[-1], ids.shape[1]), ids.dtype)
            top_logits = np.zeros(top_ids.shape, values.dtype)
            top_ids[ends - 1], top_logits[ends - 1] = ids, values
        return StepResult(
            ends - self.plan.num_rows,
            choices,
            lambda request, rows: self.last_logits[request].expand(len(rows), -1),
            top_ids,
            top_logits,
            num_rows=int(ends[-1]),
            seconds=self.seconds + perf_counter() - started,
            is_warm=False,
        )
