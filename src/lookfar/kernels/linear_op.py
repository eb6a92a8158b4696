"""Linear layers of captured steps: torch's own, or our kernels where they are faster or needed for equal bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lookfar.kernels.blas_library import CUBLASLT_ROWS, blas_library

MIN_INPUTS = 2048  # from here on the one-row kernel is faster than cuBLAS (measured on an H200, docs/benchmarks.md)
HALF_TYPES = (torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool) -> torch.Tensor:
    """`F.linear`; with `exact` the bits of a row do not depend on the number of rows."""
    alike = x.is_cuda and x.dtype == weight.dtype and weight.is_contiguous()
    if alike and exact:
        product: torch.Tensor = exact_linear(x, weight, bias)
        return product
    one_row = x.shape[-1] == x.numel() and weight.shape[1] >= MIN_INPUTS
    if alike and one_row and x.dtype in HALF_TYPES:
        product = gemv_op(x, weight, bias)
        return product
    return F.linear(x, weight, bias)


@torch.library.custom_op("lookfar::gemv", mutates_args=())
def gemv_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The one-row kernel as a torch operator, so that compilers leave it as it is."""
    from lookfar.kernels.gemv import gemv

    return gemv(x, weight, bias)


@torch.library.custom_op("lookfar::exact_linear", mutates_args=())
def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` by a library that sums in order, otherwise by our kernel that does."""
    from lookfar.kernels.in_order_linear import in_order_linear

    rows = x.reshape(-1, x.shape[-1])
    library = _library_in_order(rows, weight, bias)
    if library is None:
        return in_order_linear(rows, weight, bias).view(*x.shape[:-1], len(weight))
    with blas_library(library):
        return F.linear(x, weight, bias)


@exact_linear.register_fake
@gemv_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_in_order: dict[tuple[Any, ...], str | None] = {}  # by everything that a library's choice of a kernel depends on


def _library_in_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Return a library that gives the bits of sums in order for a shape: compared once, on random numbers."""
    key = len(x), weight.shape, x.dtype, x.device, bias is None
    if key not in _in_order and not torch.cuda.is_current_stream_capturing():
        from lookfar.kernels.in_order_linear import in_order_linear

        generator = torch.Generator(x.device).manual_seed(0)
        noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        expected, _in_order[key] = in_order_linear(noise, weight, bias), None
        for library in ("cublaslt", "cublas") if len(x) in CUBLASLT_ROWS else ("cublas", "cublaslt"):
            with blas_library(library):
                if torch.equal(F.linear(noise, weight, bias), expected):
                    _in_order[key] = library
                    break
    return _in_order.get(key)
