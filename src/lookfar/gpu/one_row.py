"""Linear layers for steps of one row. Such a product is nothing but reading the weight, so it is made for that."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LONG = 2048  # inputs from which on it is faster than cuBLAS (measured on an H200, docs/benchmarks.md)
HALVES = (torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `F.linear`, in our own way where that is faster."""
    one_row = x.shape[-1] == x.numel() and weight.shape[1] >= LONG and weight.is_contiguous()
    if one_row and x.is_cuda and x.dtype == weight.dtype and x.dtype in HALVES:
        answer: torch.Tensor = product(x, weight, bias)
        return answer
    return F.linear(x, weight, bias)


@torch.library.custom_op("lookfar::one_row", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """An operator of its own, so that compilers take it as it is."""
    from lookfar.gpu.reading import multiply

    return multiply(x, weight, bias)


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
