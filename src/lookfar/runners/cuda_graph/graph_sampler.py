"""Sampling behind a captured step: logits processors, softmax and the draw as one more CUDA graph.

Every row of a step may take its token at another position of the output, and so with other noise (see noise.py). The
host only writes where in the device's memory each row's noise lies.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from lookfar.core.arrays import Ints
from lookfar.core.jit import jit
from lookfar.core.plan import FIRST_NODE, NUM_NODES, NUM_PENDING, NUM_WINDOW, StepPlan
from lookfar.core.tree import DEPTH
from lookfar.kernels.sampling import sample
from lookfar.runners.cuda_graph.capture import capture_graph
from lookfar.sampling.noise_addresses import set_addresses
from lookfar.sampling.sampler import process_rows

WORTH_CAPTURING = 3  # uses of a sampler before it is captured, which takes some milliseconds


def set_noise_addresses(addresses: Ints, plan: StepPlan, width: int) -> list[torch.Tensor]:
    """Set where the noise of each row lies, 0 for none; returns what has to be kept until it is read.

    Noise that its call keeps may be dropped while the device works, but not be overwritten: whatever gets its memory
    is written later on the same stream.
    """
    about, _, nodes = plan.flat
    deepest = deepest_nodes(about, nodes[DEPTH])
    by_depth: Ints = np.zeros((len(about), 1 + int(deepest.max())), np.int64)
    kept: list[torch.Tensor] = []
    if not set_addresses(by_depth, plan.samplers, deepest, width):
        for place, sampler in plan.samplers.items():
            found, noise = sampler.noise_addresses(int(deepest[place]), width)
            by_depth[place, : len(found)] = found
            kept += noise
    spread_by_depth(addresses, about, nodes[DEPTH], by_depth)
    return kept


@jit
def deepest_nodes(about, depths):  # type: ignore[no-untyped-def]
    """Return the depth of the deepest draft node of each request, 0 for none."""
    deepest = np.zeros(len(about), np.int64)
    for place in range(len(about)):
        first = about[place, FIRST_NODE]
        for node in range(first, first + about[place, NUM_NODES]):
            deepest[place] = max(deepest[place], depths[node])
    return deepest


@jit
def spread_by_depth(rows, about, depths, by_depth):  # type: ignore[no-untyped-def]
    """Set the rows of the last token and of the draft nodes of every request to `by_depth`, all others to 0."""
    rows[:] = 0
    start = 0
    for place in range(len(about)):
        own = about[place]
        last = start + own[NUM_PENDING] - 1
        rows[last] = by_depth[place, 0]
        for node in range(own[NUM_NODES]):
            rows[last + 1 + node] = by_depth[place, depths[own[FIRST_NODE] + node]]
        start = last + 1 + own[NUM_NODES] + own[NUM_WINDOW]


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
        """Sample behind a step that was launched; returns whether later samples will be faster."""
        self._noise = set_noise_addresses(self._addresses.numpy(), plan, self.width)
        self._uses += 1
        if self._uses == WORTH_CAPTURING:
            with suppress(Exception):  # a processor that synchronizes with the host cannot be captured
                _, self._replay = capture_graph(self._run, self._pool)
        self._replay()
        return self._uses <= WORTH_CAPTURING
