"""A matrix-vector product: one kernel that reads the matrix at memory speed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows and columns of the weight that a program reads at once: the best over all shapes of an 8B model on an H200.
ROWS, COLUMNS, WARPS, STAGES = 8, 512, 4, 3


@triton.jit
def multiply_rows(  # type: ignore[no-untyped-def]
    x, weight, bias, y, outputs, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    rows = weight + row.to(tl.int64)[:, None] * inputs
    for start in range(0, inputs, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        there = (row < outputs)[:, None] & (at < inputs)[None, :]
        # Each weight is read once, so none of them needs to stay in the cache.
        part = tl.load(rows + at[None, :], there, 0.0, eviction_policy="evict_first")
        sums += part.to(tl.float32) * tl.load(x + at, at < inputs, 0.0).to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += tl.load(bias + row, row < outputs, 0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), row < outputs)


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of one row, summed in float32."""
    outputs, inputs = weight.shape
    y = x.new_empty(*x.shape[:-1], outputs)
    multiply_rows[(triton.cdiv(outputs, ROWS),)](
        x.contiguous(), weight, weight if bias is None else bias, y, outputs, inputs,
        ROWS=ROWS, COLUMNS=COLUMNS, HAS_BIAS=bias is not None, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return y
