"""Attention masks of a step, for each kind of attention layer a model has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lookfar.core.plan import StepPlan


@dataclass(frozen=True)
class LayerKind:
    """How far a layer looks back: all tokens, the last `window` tokens, or its own chunk of `chunk` tokens."""

    window: int | None = None
    chunk: int | None = None

    def first_visible(self, position: int) -> int:
        """Return the first position that a token at `position` sees."""
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def __str__(self) -> str:
        if self.window is not None:
            return f"sliding window of {self.window}"
        if self.chunk is not None:
            return f"chunks of {self.chunk}"
        return "full attention"


class StepMasks:
    """The attention masks of one step, on one device.

    The key axis follows the layout of the slot cache: index i < num_cached is the token at position i, and index
    num_cached + r is row r of this step.
    """

    def __init__(self, plan: StepPlan, kv_length: int, device: torch.device) -> None:
        num_cached = torch.from_numpy(plan.num_cached).to(device)  # [batch]
        self.query_positions = torch.from_numpy(plan.positions).to(device)  # [batch, rows]
        visible = torch.from_numpy(plan.visible).to(device)  # [batch, rows, rows]
        index = torch.arange(kv_length, device=device)
        row = index - num_cached[:, None]  # [batch, kv]
        inside = (row >= 0) & (row < plan.width)
        row = row.clamp(0, plan.width - 1)
        self.key_positions = torch.where(inside, self.query_positions.gather(1, row), index)  # [batch, kv]
        in_step = visible.gather(2, row[:, None].expand(-1, plan.width, -1)) & inside[:, None]
        self.full = in_step | (index < num_cached[:, None])[:, None]  # [batch, rows, kv]

    def of(self, kind: LayerKind) -> torch.Tensor:
        """[batch, 1, rows, kv] for one kind of layer, True where a row may look.

        Distances are measured between positions: a tree node has a larger index than its position.
        """
        query, key = self.query_positions[:, :, None], self.key_positions[:, None]
        mask = self.full
        if kind.window is not None:
            mask = mask & (query - key < kind.window)
        if kind.chunk is not None:
            mask = mask & (query // kind.chunk == key // kind.chunk)
        return mask[:, None]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that is added to the scores: 0 where a row may look."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
