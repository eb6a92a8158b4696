"""Runners: how the forward pass of a step is executed, eagerly or as a CUDA graph."""

from __future__ import annotations

import importlib.util
import warnings

import torch

from lookfar.errors import ConfigError, LookfarWarning
from lookfar.models.binding import BoundModel
from lookfar.runners.base import ModelRunner
from lookfar.runners.eager import EagerRunner

GRAPH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def create_runner(
    model: BoundModel, cuda_graphs: bool | None = None, compile: bool = False, exact: bool = False
) -> ModelRunner:
    """Return a CUDA graph runner where one is available (`cuda_graphs=None`) or asked for, otherwise an eager one."""
    options = {"cuda_graphs": cuda_graphs, "compile": compile, "exact": exact}
    asked = [name for name, value in options.items() if value]
    if cuda_graphs is False and asked:
        raise ConfigError(f"{asked[0]}=True needs CUDA graphs: remove cuda_graphs=False.")
    if cuda_graphs is False or not model.support.trees:
        return EagerRunner(model)
    reason = why_no_graphs(model)
    if not reason:
        from lookfar.runners.cuda_graph.runner import CudaGraphRunner

        runner = CudaGraphRunner(model, compile=compile, exact=exact)
        reason = runner.why_unavailable()
        if not reason:
            return runner
        if not asked:
            warnings.warn(f"{model.support.model_type} runs without CUDA graphs: {reason}.", LookfarWarning, 4)
    if asked:
        raise ConfigError(f"{asked[0]}=True is unavailable for this model: {reason}.")
    return EagerRunner(model)


def why_no_graphs(model: BoundModel) -> str:
    """Return why CUDA graphs are unavailable here, whatever the model's code is; empty if they are available."""
    if model.device.type != "cuda":
        return "it is not on a CUDA device"
    if len({parameter.device for parameter in model.model.parameters()}) > 1:
        return "it is spread over several devices"
    if model.model.dtype not in GRAPH_DTYPES:
        return f"it is {str(model.model.dtype).removeprefix('torch.')}, and the kernels take float32 and half precision"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return ""
