"""Which weight of a checkpoint does not have the shape that the config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

FIX = "use the config.json that came with the weights"


def mismatch(where: str, auto: Any, config: PreTrainedConfig) -> str:
    """Return a sentence that names the first such weight, if the files are safetensors in a directory."""
    with torch.device("meta"):
        expected = {name: list(weight.shape) for name, weight in auto.from_config(config).state_dict().items()}
    for file in sorted(Path(where).glob("*.safetensors")) if Path(where).is_dir() else ():
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  it is no dictionary
                shape = list(weights.get_slice(name).get_shape())
                if expected.get(name, shape) != shape:
                    return f"{name} has the shape {shape} in its weights and {expected[name]} by its config, so {FIX}"
    return f"its weights do not have the shapes that its config asks for, so {FIX}"
