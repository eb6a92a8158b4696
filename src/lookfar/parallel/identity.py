"""What all ranks must have in common: the model, how it is run, and the versions of the libraries."""

from __future__ import annotations

from hashlib import sha256

import torch
import transformers

from lookfar.core.arrays import Int32s
from lookfar.parallel.messages import digest
from lookfar.runners.base import ModelRunner
from lookfar.version import __version__

SAMPLED = 32  # values of each weight


def model_identity(runner: ModelRunner) -> Int32s:
    """Return integers that are the same for the same model, run in the same way."""
    model, weights = runner.model, sha256()
    for name, weight in model.model.named_parameters():
        values = weight.detach().reshape(-1)
        sample = values[:: max(values.numel() // SAMPLED, 1)]
        if not sample.is_meta:
            weights.update(name.encode())
            weights.update(sample.to("cpu", torch.float64).numpy().tobytes())
    facts = [
        __version__,
        torch.__version__,
        transformers.__version__,
        model.support.model_type,
        model.support.mode,
        model.vocab_size,
        model.model.dtype,
        model.device.type,
        runner.name,
        weights.hexdigest(),
    ]
    return digest(" ".join(map(str, facts)))
