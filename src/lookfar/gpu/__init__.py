"""Steps as fast as a GPU allows: rows packed side by side, an attention of our own, captured graphs."""

from __future__ import annotations

import importlib.util
import warnings

import torch

from lookfar.answers import EagerSteps, Steps
from lookfar.errors import ConfigError, LookfarWarning
from lookfar.model import BoundModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def steps_for(model: BoundModel, capture: bool | None, compile: bool, exact: bool) -> Steps:
    """Captured steps where they can be had (`capture=None`) or must be; otherwise eager ones."""
    asked = [name for name, value in {"capture": capture, "compile": compile, "exact": exact}.items() if value]
    if capture is False and asked:
        raise ConfigError(f"{asked[0]}=True needs captured steps: leave capture=False away.")
    if capture is False or not model.support.trees:
        return EagerSteps(model)
    reason = why_not(model)
    if not reason:
        from lookfar.gpu.graphs import CapturedSteps

        steps = CapturedSteps(model, compile=compile, exact=exact)
        reason = steps.why_not()
        if not reason:
            return steps
        if not asked:
            warnings.warn(f"{model.support.model_type} runs without captured steps: {reason}.", LookfarWarning, 4)
    if asked:
        raise ConfigError(f"{asked[0]}=True cannot be had for this model: {reason}.")
    return EagerSteps(model)


def why_not(model: BoundModel) -> str:
    """Why steps cannot be captured here, whatever the model's code is; empty if they can."""
    if model.device.type != "cuda":
        return "it is not on a CUDA device"
    if len({parameter.device for parameter in model.model.parameters()}) > 1:
        return "it is spread over several devices"
    if model.model.dtype not in DTYPES:
        return (
            f"its numbers are {str(model.model.dtype).removeprefix('torch.')}, and the kernels know float32 and halves"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return ""
