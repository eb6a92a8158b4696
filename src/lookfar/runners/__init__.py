"""Runners: how the forward pass of a step is executed, eagerly or as a CUDA graph."""

from __future__ import annotations

import warnings

from lookfar.errors import ConfigError, LookfarWarning
from lookfar.models.binding import BoundModel
from lookfar.runners.base import ModelRunner
from lookfar.runners.compiled_cpu import CompiledRunner
from lookfar.runners.cuda_graph.availability import why_no_graphs
from lookfar.runners.eager import EagerRunner
from lookfar.runners.flat import why_not_flat

NO_GRAPHS = "its drafts are verified as chains, and only trees are captured"


def create_runner(
    model: BoundModel, cuda_graphs: bool | None = None, compile: bool = False, exact: bool | None = None
) -> ModelRunner:
    """Return a CUDA graph runner where one is available (`cuda_graphs=None`) or asked for, otherwise an eager one."""
    options = {"cuda_graphs": cuda_graphs, "compile": compile, "exact": exact}
    asked = [name for name, value in options.items() if value]
    if cuda_graphs is False and asked:
        raise ConfigError(f"{asked[0]}=True needs CUDA graphs: remove cuda_graphs=False.")
    if not model.support.trees:
        if asked and model.support.drafts:
            raise ConfigError(f"{asked[0]}=True is unavailable for this model: {NO_GRAPHS}.")
        if cuda_graphs is None and model.support.drafts and model.device.type == "cuda":
            warnings.warn(f"{model.support.model_type} runs without CUDA graphs: {NO_GRAPHS}.", LookfarWarning, 4)
        return EagerRunner(model)
    eager = EagerRunner(model) if why_not_flat(model) else CompiledRunner(model)
    if cuda_graphs is False:
        return eager
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
    return eager
