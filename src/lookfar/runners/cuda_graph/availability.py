"""Whether steps can be captured as CUDA graphs, whatever the model's code is."""

from __future__ import annotations

import importlib.util

import torch

from lookfar.models.binding import BoundModel

GRAPH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_no_graphs(model: BoundModel) -> str:
    """Return why CUDA graphs are unavailable here, whatever the model's code is; empty if they are available."""
    if model.device.type != "cuda":
        return "it is not on a CUDA device"
    if len({parameter.device for parameter in model.model.parameters()}) > 1:
        return "it is spread over several devices"
    if model.model.dtype not in GRAPH_DTYPES:
        return f"it is {str(model.model.dtype).removeprefix('torch.')}, and the kernels take float32 and half precision"
    if model.support.indexed:
        return "its indexer reads the mask"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return ""
