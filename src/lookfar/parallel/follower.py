"""The other ranks: they repeat what rank 0 does to its KV cache, compute their shares of steps, and decide nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from lookfar.core.arrays import Int32s
from lookfar.errors import CapacityError, first_sentence
from lookfar.kvcache.slots import SlotKVCache
from lookfar.parallel.answers import answer_of, frame_of
from lookfar.parallel.group import FRAME, Group
from lookfar.parallel.identity import model_identity
from lookfar.parallel.messages import ANSWERED, ROWS, Op, Operation, as_values, decode, decode_step
from lookfar.runners.base import ModelRunner, StepResult, StepShape

NO_VALUES: Int32s = np.zeros(0, np.int32)


def send_answer(group: Group, values: Int32s, frame: int = FRAME) -> None:
    """Answer rank 0."""
    group.send(0, np.append(np.zeros(1, np.int32), values), frame)


def send_failure(group: Group, sentence: str, frame: int = FRAME) -> None:
    """Tell rank 0, instead of an answer, what has failed."""
    text = as_values(sentence)
    group.send(0, np.append(np.array([len(text)], np.int32), text), frame)


class Follower:
    """Carries out the operations of rank 0, in their order."""

    def __init__(self, runner: ModelRunner, group: Group) -> None:
        self.runner, self.group = runner, group
        self.caches: dict[int, SlotKVCache] = {}
        self.result: StepResult | None = None  # of the last step
        self.failure = ""  # of an operation without an answer, for the next answer
        self._do: dict[Op, Callable[[Operation], Int32s | None]] = {
            Op.DROP: self._drop,
            Op.RESERVE: self._reserve,
            Op.CLEAR: lambda op: self._cache(op).clear(),
            Op.FORGET: lambda op: self._cache(op).forget(),
            Op.ALLOCATE: self._allocate,
            Op.COMMIT: self._commit,
            Op.TRUNCATE: lambda op: self._cache(op).truncate(*op.values.tolist()),
            Op.FREE: self._free,
            Op.ABANDON: lambda op: self._cache(op).abandon(),
            Op.CAPTURE: lambda op: self.runner.capture(self._cache(op), StepShape(*op.values.tolist())),
            Op.REFRESH: self._refresh,
            Op.LOGITS: self._send_rows,
            Op.HIDDEN: self._send_rows,
        }

    def run(self) -> int:
        """Follow rank 0 until it ends; returns the exit code."""
        with torch.no_grad():
            while True:
                for op in decode(self.group.receive(0)):
                    if op.code is Op.END:
                        return int(op.values[0])
                    self._carry_out(op)

    def _carry_out(self, op: Operation) -> None:
        answers = op.code in ANSWERED or (op.code is Op.ALLOCATE and len(op.values) > 1)
        answer: Int32s | None = None
        frame = FRAME
        try:
            if op.code is Op.STEP:
                frame, answer = self._step(op)
            else:
                answer = self._do[op.code](op)
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {first_sentence(error)}."
            answers = answers or op.code in ROWS
        if not answers:
            return
        if self.failure or answer is None:
            send_failure(self.group, self.failure, frame)
            self.failure = ""
        else:
            send_answer(self.group, answer, frame)

    def _cache(self, op: Operation) -> SlotKVCache:
        if op.cache not in self.caches:
            self.caches[op.cache] = self.runner.create_cache()
        return self.caches[op.cache]

    def _drop(self, op: Operation) -> None:
        self.caches.pop(op.cache, None)

    def _reserve(self, op: Operation) -> Int32s:
        cache, (requests, length, most, keep) = self._cache(op), op.values.tolist()
        with suppress(CapacityError):  # rank 0 sees it from the answer
            cache.reserve(requests, length, most=most, keep=bool(keep))
        return np.array([cache.slots, cache.capacity], np.int32)

    def _allocate(self, op: Operation) -> Int32s:
        handle, *prompt = op.values.tolist()
        cache = self._cache(op)
        cache.next_handle = handle  # also after an allocation that failed here
        return np.array([cache.allocate(prompt)[1]], np.int32)

    def _commit(self, op: Operation) -> None:
        handle, first, *others = op.values.tolist()
        self._cache(op).commit(handle, first, others)

    def _free(self, op: Operation) -> None:
        handle, *tokens = op.values.tolist()
        self._cache(op).free(handle, tokens)

    def _refresh(self, op: Operation) -> Int32s:
        self.runner.refresh(bool(op.values[0]))
        return model_identity(self.runner)

    def _step(self, op: Operation) -> tuple[int, Int32s | None]:
        plan, reported = decode_step(op.values)
        top_k = min(plan.top_k, self.runner.model.vocab_size)
        frame = frame_of(sum(map(len, reported)), top_k)
        if self.failure:
            return frame, None
        try:
            self.result = self.runner.launch(plan, self._cache(op)).result()
            return frame, answer_of(self.result, reported, top_k)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {first_sentence(error)}."
            return frame, None

    def _send_rows(self, op: Operation) -> None:
        """Send rows of logits or hidden states of the last step; the place of the request stands for the cache."""
        assert self.result is not None
        read = self.result.logits if op.code is Op.LOGITS else self.result.hidden
        assert read is not None
        found = read(op.cache, op.values.astype(np.int64))
        send_answer(self.group, NO_VALUES)
        self.group.send_tensor(0, found)
