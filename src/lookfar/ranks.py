"""The place of a process among the ranks that torchrun has started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lookfar.errors import ConfigError

NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and its device."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"


def world_size() -> int:
    """Return the number of ranks that torchrun has started; 1 without torchrun."""
    return _number("WORLD_SIZE", 1)


def own_rank() -> int:
    """Return the rank of this process; 0 without torchrun."""
    return _number("RANK", 0) if world_size() > 1 else 0


def find_ranks(device: str | None) -> Ranks:
    """Return the place of this process. `device` is what was asked for; by default each rank takes a GPU of its own."""
    size = world_size()
    if size <= 1:
        return Ranks()
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but {missing[0]} is not set: start the ranks with torchrun, or unset WORLD_SIZE."
        )
    rank = own_rank()
    if rank >= size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {size}: start the ranks with torchrun.")
    return Ranks(rank, size, _own_device(device))


def _own_device(device: str | None) -> str:
    import torch

    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return "cpu"
    if device not in (None, "cuda"):
        raise ConfigError(f"Each rank takes a GPU of its own: remove device={device!r}, or use cpu.")
    gpus, here = torch.cuda.device_count(), _number("LOCAL_WORLD_SIZE", 1)
    if gpus < here:
        fix = f"start torchrun with --nproc-per-node {gpus}" if gpus else "use device='cpu'"
        raise ConfigError(f"{here} ranks were started on a machine with {gpus} GPUs: {fix}.")
    return f"cuda:{_number('LOCAL_RANK', 0)}"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a whole number, not {text!r}: start the ranks with torchrun.")
    return int(text)
