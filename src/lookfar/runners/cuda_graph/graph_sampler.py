"""Sampling behind a captured step: logits processors, softmax and the draw as one more CUDA graph.

Every row of a step may take its token at another position of the output, and so with other noise (see noise.py). The
host only writes where in the device's memory each row's noise lies.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from transformers import LogitsProcessorList

from lookfar.core.plan import StepPlan
from lookfar.kernels.sampling import sample
from lookfar.runners.cuda_graph.capture import capture_graph
from lookfar.sampling.sampler import process_rows

WORTH_CAPTURING = 256  # uses of a sampler before it is captured, which takes a fraction of a second


class GraphSampler:
    """Samples the tokens after all rows of a step, for one shape of step and one list of processors.

    It is captured once it has been used so often that this pays; until then its kernels are launched one by one.
    """

    def __init__(self, logits: torch.Tensor, processors: LogitsProcessorList | None, pool: Any) -> None:
        rows, self.width = logits.shape
        self.sampled = torch.zeros(rows, dtype=torch.int32, pin_memory=logits.is_cuda)
        self._addresses = torch.zeros(rows, dtype=torch.int64, pin_memory=logits.is_cuda)  # of the noise; 0: none
        self._on_device = torch.zeros(rows, dtype=torch.int64, device=logits.device)
        self._logits, self._processors, self._pool = logits, processors, pool
        self._noise: list[torch.Tensor] = []  # kept until the tokens are sampled
        self._uses = 0
        self._replay = self._run

    def _run(self) -> None:
        self._on_device.copy_(self._addresses, non_blocking=True)
        sampled = sample(process_rows(self._processors, self._logits), self._on_device)
        self.sampled.copy_(sampled, non_blocking=True)

    def launch(self, plan: StepPlan) -> bool:
        """Sample behind a step that was launched; returns whether something was compiled or captured for it."""
        addresses = self._addresses.numpy()
        addresses[:] = 0
        self._noise.clear()
        for rows, start in zip(plan.requests, accumulate(plan.lengths, initial=0), strict=False):
            if rows.sampler is not None and rows.complete:
                found, noise = rows.sampler.noise_addresses(rows.tree.depths, self.width)
                first = start + rows.last_row
                addresses[first : first + len(found)] = found
                self._noise += noise
        self._uses += 1
        if self._uses == WORTH_CAPTURING:
            with suppress(Exception):  # a processor that synchronizes with the host cannot be captured
                _, self._replay = capture_graph(self._run, self._pool)
        self._replay()
        return self._uses in (1, WORTH_CAPTURING)
