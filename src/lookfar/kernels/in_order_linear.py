"""A linear layer whose sums run over the inputs in order, so that a row's bits do not depend on the number of rows.

Tiles of all sizes add the same groups of products one after the other. Libraries do so too, unless they split the
inputs over several programs, which changes the order of the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tiles(NamedTuple):
    """The block that one program multiplies at once."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# By the most rows that they are for; the best over the shapes of an 8B model on an H200.
TILES = {16: Tiles(16, 32, 256, 2, 4), 64: Tiles(64, 32, 128, 4, 4), 1 << 30: Tiles(128, 128, 64, 8, 3)}


@triton.jit
def multiply_in_order(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    y,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.arange(0, INPUTS)
    x_rows = x + row.to(tl.int64)[:, None] * inputs + at[None, :]
    weight_rows = weight + output.to(tl.int64)[:, None] * inputs + at[None, :]
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        x_there, weight_there = (row < rows)[:, None], (output < outputs)[:, None]
        if not WHOLE:
            x_there = x_there & (start + at < inputs)[None, :]
            weight_there = weight_there & (start + at < inputs)[None, :]
        x_block = tl.load(x_rows + start, x_there, 0.0)
        weight_block = tl.load(weight_rows + start, weight_there, 0.0)
        sums = tl.dot(x_block, tl.trans(weight_block), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, output < outputs, 0.0).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), (row < rows)[:, None] & (output < outputs)[None, :])


def in_order_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` for x [rows, inputs], with sums in float32."""
    rows, (outputs, inputs) = len(x), weight.shape
    y = x.new_empty(rows, outputs)
    tiles = next(tiles for most, tiles in TILES.items() if rows <= most)
    if x.dtype == torch.float32:
        tiles = Tiles(16, 32, 32, 4, 2)  # products in float32 take many registers
    grid = triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows)
    multiply_in_order[grid](
        x.contiguous(), weight, weight if bias is None else bias, y, rows, outputs, inputs,
        ROWS=tiles.rows, OUTPUTS=tiles.outputs, INPUTS=tiles.inputs, HAS_BIAS=bias is not None,
        WHOLE=inputs % tiles.inputs == 0, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y
