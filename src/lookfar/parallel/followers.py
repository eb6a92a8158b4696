"""Rank 0's side: operations for the other ranks, and their answers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch

from lookfar.core.arrays import Int32s, Ints
from lookfar.errors import RankError
from lookfar.parallel.group import FOREVER, FRAME, Group
from lookfar.parallel.messages import Op, encode, text_of

STATUS = 1  # an answer begins with it: 0, or the length of the sentence that says what failed


class Followers:
    """Queues operations until an answer is needed, so that one message carries all operations between two steps."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._queues: dict[int, list[Int32s]] = {rank: [] for rank in group.others}
        self._owing: dict[int, int] = {}  # ranks that have not answered yet → the frame of their answer

    def post(self, code: Op, cache: int, values: Seq[int] | Int32s = ()) -> None:
        """Queue an operation for all ranks."""
        operation = encode(code, cache, values)
        for queue in self._queues.values():
            queue.append(operation)

    def post_to(self, rank: int, code: Op, cache: int, values: Seq[int] | Int32s) -> None:
        """Queue an operation for one rank."""
        self._queues[rank].append(encode(code, cache, values))

    def flush(self, frames: Seq[int]) -> None:
        """Send what is queued. Every rank will answer, in `frames` integers if it can."""
        self.drain()
        for rank, frame in zip(self._queues, frames, strict=True):
            self._send(rank)
            self._owing[rank] = frame

    def _send(self, rank: int) -> None:
        message, self._queues[rank] = np.concatenate(self._queues[rank]), []
        self.group.send(rank, message)

    def ask(self) -> list[Int32s]:
        """Send what is queued and return the answers of all ranks."""
        self.flush([FRAME] * len(self._queues))
        return self.answers()

    def hello(self) -> list[Int32s]:
        """Wait until all ranks have loaded the model, and return how they identify it."""
        self._owing = dict.fromkeys(self._queues, FRAME)
        return self.answers(FOREVER)

    def answers(self, patience: timedelta | None = None) -> list[Int32s]:
        """Wait for the answers of all ranks. Raises the first failure when all have answered."""
        found, failures = [], []
        for rank in list(self._owing):
            answer = self.group.receive(rank, self._owing.pop(rank), patience)
            if answer[0]:
                failures.append(f"Rank {rank}: {text_of(answer[STATUS:])}")
            found.append(answer[STATUS:])
        if failures:
            raise RankError(failures[0])
        return found

    def drain(self) -> None:
        """Throw away answers that were not waited for, of a step that failed here."""
        if self._owing and self.group.failure is None:
            for rank in list(self._owing):
                self.group.receive(rank, self._owing.pop(rank))

    def rows(self, rank: int, code: Op, request: int, rows: Ints, like: torch.Tensor) -> torch.Tensor:
        """Return rows of logits or hidden states that a rank has computed in the last step, on the device of `like`."""
        self.post_to(rank, code, request, rows.astype(np.int32))
        self._send(rank)
        self._owing = {rank: FRAME}
        self.answers()
        return self.group.receive_tensor(rank, like, len(rows))

    def end(self) -> None:
        """Let the other ranks end; with an error, if the group is broken."""
        with suppress(RankError):
            self.drain()
        failed = self.group.failure is not None
        for rank in self.group.others:
            self.group.failure = None  # of another rank, perhaps
            try:
                self.group.send(rank, encode(Op.END, 0, [int(failed)]))
            except RankError:
                failed = True
