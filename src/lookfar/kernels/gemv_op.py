"""Linear layers that use the matrix-vector kernel for steps of one row, where it is faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_INPUTS = 2048  # from here on the kernel is faster than cuBLAS (measured on an H200, docs/benchmarks.md)
HALF_TYPES = (torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`, with the matrix-vector kernel where it is faster."""
    one_row = x.shape[-1] == x.numel() and weight.shape[1] >= MIN_INPUTS and weight.is_contiguous()
    if one_row and x.is_cuda and x.dtype == weight.dtype and x.dtype in HALF_TYPES:
        product: torch.Tensor = gemv_op(x, weight, bias)
        return product
    return F.linear(x, weight, bias)


@torch.library.custom_op("lookfar::gemv", mutates_args=())
def gemv_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The kernel as a torch operator, so that compilers leave it as it is."""
    from lookfar.kernels.gemv import gemv

    return gemv(x, weight, bias)


@gemv_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
