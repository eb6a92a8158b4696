"""The group of ranks: messages between rank 0 and the others over `torch.distributed`.

Integers travel over gloo, on GPUs too: they are made and read on the host. Rows of logits and hidden states travel from
where they are, between GPUs over NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lookfar.core.arrays import Int32s
from lookfar.errors import ConfigError, RankError
from lookfar.ranks import Ranks

FRAME = 128  # integers of the first part of a message, its length included; most messages have no other part
FOREVER = timedelta(days=3650)
JOINING = timedelta(minutes=10)  # for all ranks to start


class Group:
    """The connections of one rank: rank 0 talks to all others, and these to rank 0 only.

    When a rank has ended or does not answer, the group is broken for good.
    """

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        # Rank 0 waits for answers. The others wait for rank 0, which may be idle, or busy for long: until it ends.
        self.patience = FOREVER if self.rank else timedelta(seconds=timeout)
        self.failure: RankError | None = None
        self.exchanged = 0  # bytes, sent and received
        self._process = os.getpid()
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is already initialised in this process: use lookfar.load, or destroy the group."
            )
        backend = "cpu:gloo,cuda:nccl" if ranks.device.startswith("cuda") else "gloo"
        try:
            dist.init_process_group(backend, timeout=JOINING)
        except (RuntimeError, ValueError) as error:
            minutes = JOINING.total_seconds() / 60
            raise RankError(
                f"Not all of the {self.size} ranks joined within {minutes:g} minutes: start them with one torchrun."
            ) from error

    @property
    def is_own(self) -> bool:
        """Whether the connections are those of this process, and not of the one that it was forked from."""
        return os.getpid() == self._process

    @property
    def others(self) -> range:
        """The ranks that follow rank 0."""
        return range(1, self.size)

    def send(self, to: int, values: Int32s, frame: int = FRAME) -> None:
        """Send integers; the receiver has to expect the same frame."""
        first = np.zeros(frame, np.int32)
        first[0] = len(values)
        count = min(len(values), frame - 1)
        first[1 : 1 + count] = values[:count]
        self._send(to, torch.from_numpy(first))
        if count < len(values):
            self._send(to, torch.from_numpy(np.ascontiguousarray(values[count:])))

    def receive(self, source: int, frame: int = FRAME, patience: timedelta | None = None) -> Int32s:
        """Wait for integers."""
        first = torch.empty(frame, dtype=torch.int32)
        self._receive(source, first, patience)
        length = int(first[0])
        if length < frame:
            return first.numpy()[1 : 1 + length]
        rest = torch.empty(length - frame + 1, dtype=torch.int32)
        self._receive(source, rest, None)
        return torch.cat([first[1:], rest]).numpy()

    def send_tensor(self, to: int, tensor: torch.Tensor) -> None:
        """Send a tensor from its device."""
        self._send(to, tensor.contiguous())

    def receive_tensor(self, source: int, like: torch.Tensor, rows: int) -> torch.Tensor:
        """Wait for a tensor, [rows, …], of the kind of another one."""
        tensor = torch.empty(rows, *like.shape[1:], dtype=like.dtype, device=like.device)
        self._receive(source, tensor, None)
        return tensor

    def _send(self, to: int, tensor: torch.Tensor) -> None:
        self._attempt(to, self.patience, lambda wait: _waited(dist.isend(tensor, to), wait))
        self.exchanged += tensor.nbytes

    def _receive(self, source: int, tensor: torch.Tensor, patience: timedelta | None) -> None:
        self._attempt(source, patience or self.patience, lambda wait: _waited(dist.irecv(tensor, source), wait))
        self.exchanged += tensor.nbytes

    def _attempt(self, other: int, patience: timedelta, exchange: Callable[[timedelta], None]) -> None:
        """Send or receive; an error of the connection breaks the group."""
        if self.failure is not None:
            raise self.failure
        if not self.is_own:
            raise RankError("The ranks belong to the parent process: decode there.")
        try:
            exchange(patience)
        except (RuntimeError, ValueError) as error:
            late = "timed out" in str(error).lower()
            reason = f"did not answer within {patience.total_seconds():g} seconds" if late else "has ended"
            self.failure = RankError(f"Rank {other} {reason}: start all ranks again.")
            raise self.failure from error

    def leave(self) -> None:
        """Close the connections."""
        if self.is_own and dist.is_initialized():
            dist.destroy_process_group()


def _waited(work: Any, wait: timedelta) -> None:
    work.wait(wait)
