"""Programmatic dependent launch: a kernel is launched while the one before it still runs.

On Hopper and later this hides the launch. Every program of such a kernel calls `wait` before it touches what another
kernel of the step reads or writes, and before it returns: a kernel counts as done when its programs are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

HOPPER = 9  # major compute capability


@triton.jit
def wait(OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernels before this one are done, and let the next one be launched meanwhile."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Return the arguments with which kernels that call `wait` are launched on a device."""
    if device.type != "cuda" or torch.version.hip is not None or not _is_known():
        return {"OVERLAPS": False}
    overlaps = torch.cuda.get_device_capability(device)[0] >= HOPPER
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@cache
def _is_known() -> bool:
    """Whether this version of Triton has the launch option and the instructions."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return "launch_pdl" in CUDAOptions.__dataclass_fields__ and hasattr(tl.extra.cuda, "gdc_wait")
