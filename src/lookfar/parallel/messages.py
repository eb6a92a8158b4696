"""Messages between ranks: token ids, row numbers and counts, as 32-bit integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from enum import IntEnum
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lookfar.core.arrays import Bools, Int32s, Ints
from lookfar.core.plan import NO_WINDOW, RequestPlan, StepPlan, WindowRows
from lookfar.core.tree import NO_TREE, DraftTree
from lookfar.parallel.split import RankShare


class Op(IntEnum):
    """What rank 0 asks of the others. Most are operations of the KV cache, which every rank repeats."""

    END = 0
    DROP = 1  # a KV cache is not used any more
    RESERVE = 2
    CLEAR = 3
    FORGET = 4
    ALLOCATE = 5
    COMMIT = 6
    TRUNCATE = 7
    FREE = 8
    ABANDON = 9
    CAPTURE = 10
    REFRESH = 11
    STEP = 12
    LOGITS = 13
    HIDDEN = 14


ANSWERED = {Op.RESERVE, Op.REFRESH, Op.STEP}  # and an allocation with a prompt
ROWS = {Op.LOGITS, Op.HIDDEN}  # answered with an empty answer and a tensor


class Operation(NamedTuple):
    """One operation on one of the KV caches."""

    code: Op
    cache: int
    values: Int32s


def encode(code: Op, cache: int, values: Seq[int] | Int32s = ()) -> Int32s:
    """Return an operation as integers."""
    body = np.asarray(values, np.int32)
    return np.concatenate([np.array([code, cache, len(body)], np.int32), body])


def decode(message: Int32s) -> Iterator[Operation]:
    """Yield the operations of a message."""
    at = 0
    while at < len(message):
        code, cache, count = message[at : at + 3].tolist()
        yield Operation(Op(code), cache, message[at + 3 : at + 3 + count])
        at += 3 + count


def text_of(values: Int32s) -> str:
    """Return the text that `as_values` has encoded."""
    return bytes(values.astype(np.uint8)).decode()


def as_values(text: str) -> Int32s:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def digest(text: str) -> Int32s:
    """Return eight integers that tell a text from others."""
    return np.frombuffer(sha256(text.encode()).digest(), np.int32)


def encode_step(share: RankShare) -> Int32s:
    """Return the rows of a rank as integers."""
    plan = share.plan
    parts: list[npt.NDArray[Any]] = [np.array([plan.batch, plan.top_k, plan.prefills, plan.hidden, plan.shared])]
    for rows, reported in zip(plan.requests, share.reported, strict=True):
        about = (rows.kv, rows.num_cached, rows.complete, rows.predict)
        parts.append(np.array([*about, len(rows.pending), len(rows.tree), len(rows.windows), len(reported)]))
        parts += [rows.pending, rows.tree.columns[:3].reshape(-1)]
        for window in rows.windows:
            parts += [np.array([len(window)]), window.tokens, window.offsets, window.wanted]
            parts.append(_as_bits(window.sees))
        parts.append(reported)
    return np.concatenate(parts).astype(np.int32)


def decode_step(values: Int32s) -> tuple[StepPlan, list[Ints]]:
    """Return the plan of a rank, and the rows of each request whose results it reports."""
    reader = _Reader(values)
    batch, top_k, prefills, hidden, shared = reader.take(5).tolist()
    requests, reported = [], []
    for _ in range(batch):
        kv, cached, complete, predict, pending, nodes, windows, reports = reader.take(8).tolist()
        rows = RequestPlan(reader.take(pending).astype(np.int64), cached, kv, bool(complete), predict)
        rows.tree = _tree(reader.take(3 * nodes).reshape(3, nodes))
        rows.windows = tuple(_window(reader) for _ in range(windows))
        requests.append(rows)
        reported.append(reader.take(reports).astype(np.int64))
    plan = StepPlan(requests, top_k)
    plan.prefills, plan.hidden, plan.shared = bool(prefills), bool(hidden), bool(shared)
    return plan, reported


def _tree(columns: Int32s) -> DraftTree:
    nodes = columns.shape[1]
    if not nodes:
        return NO_TREE
    return DraftTree(np.concatenate([columns, np.zeros((2, nodes), np.int32)]), np.zeros(nodes, np.float32))


def _as_bits(flags: Bools) -> Int32s:
    """Return flags as bits, 32 in each integer."""
    packed = np.packbits(flags)
    return np.append(packed, np.zeros(-len(packed) % 4, np.uint8)).view(np.int32)


def _window(reader: _Reader) -> WindowRows:
    (count,) = reader.take(1).tolist()
    tokens, offsets, wanted = (reader.take(count).astype(np.int64) for _ in range(3))
    packed = np.ascontiguousarray(reader.take(-(-count * count // 32))).view(np.uint8)
    if not count:
        return NO_WINDOW
    sees = np.unpackbits(packed, count=count * count).astype(bool).reshape(count, count)
    return WindowRows(tokens, offsets, sees, wanted.astype(bool))


class _Reader:
    """Takes one part of a message after the other."""

    def __init__(self, values: Int32s) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> Int32s:
        self._at += count
        return self._values[self._at - count : self._at]
