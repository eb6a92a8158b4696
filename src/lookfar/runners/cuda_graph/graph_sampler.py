"""Sampling behind a captured step: logits processors, softmax and the draw as one more CUDA graph.

Every row of a step may take its token at another position of the output, and so with other noise (see noise.py). The
host only writes where in the device's memory each row's noise lies.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from transformers import LogitsProcessorList

from lookfar.core.plan import StepPlan
from lookfar.kernels.sampling import sample
from lookfar.runners.cuda_graph.capture import capture_graph
from lookfar.sampling.sampler import process_rows


class GraphSampler:
    """Samples the tokens after all rows of a step, for one shape of step and one list of processors."""

    def __init__(self, logits: torch.Tensor, processors: LogitsProcessorList | None, pool: Any) -> None:
        rows, self.width = logits.shape
        self.sampled = torch.zeros(rows, dtype=torch.int32, pin_memory=True)
        self._addresses = torch.zeros(rows, dtype=torch.int64, pin_memory=True)  # of each row's noise; 0: none
        self._noise: list[torch.Tensor] = []  # kept until the tokens are sampled
        on_device = torch.zeros(rows, dtype=torch.int64, device=logits.device)

        def run() -> None:
            on_device.copy_(self._addresses, non_blocking=True)
            self.sampled.copy_(sample(process_rows(processors, logits), on_device), non_blocking=True)

        _, self._replay = capture_graph(run, pool)

    def launch(self, plan: StepPlan) -> None:
        """Sample behind a step that was launched."""
        addresses = self._addresses.numpy()
        addresses[:] = 0
        self._noise.clear()
        for rows, start in zip(plan.requests, accumulate(plan.lengths, initial=0), strict=False):
            if rows.sampler is not None and rows.complete:
                noise = rows.sampler.noise_of(rows.tree.depths, self.width)
                first = start + rows.last_row
                addresses[first : first + len(noise)] = [one.data_ptr() for one in noise]
                self._noise += noise
        self._replay()
