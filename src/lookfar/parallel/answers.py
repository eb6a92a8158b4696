"""The answer of a rank to a step: its choices, and the most likely tokens where drafters want them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lookfar.core.arrays import Int32s, Ints
from lookfar.parallel.followers import STATUS
from lookfar.runners.base import StepResult

HEADER = 2  # computed rows, and whether the times mean something


def frame_of(rows: int, top_k: int) -> int:
    """Return the integers of an answer with the results of so many rows."""
    return 1 + STATUS + HEADER + rows * (1 + 2 * top_k)


def answer_of(result: StepResult, reported: Seq[Ints], top_k: int) -> Int32s:
    """Return the results of some rows of each request."""
    rows = np.concatenate([start + rows for start, rows in zip(result.starts, reported, strict=True)])
    parts: list[Int32s | Ints] = [np.array([result.num_rows, result.is_warm]), result.choices[rows]]
    if top_k and result.top_ids is not None and result.top_logits is not None:
        logits = result.top_logits[rows].astype(np.float32)
        parts += [result.top_ids[rows].reshape(-1), logits.reshape(-1).view(np.int32)]
    return np.concatenate(parts).astype(np.int32)


def read_answer(answer: Int32s, places: Ints, result: StepResult) -> None:
    """Enter the results of another rank's rows at their places."""
    result.num_rows = max(result.num_rows, int(answer[0]))
    result.is_warm = result.is_warm and bool(answer[1])
    rows, values = len(places), answer[HEADER:]
    result.choices[places] = values[:rows]
    if len(values) > rows and result.top_ids is not None and result.top_logits is not None:
        ids, logits = np.split(values[rows:], 2)
        result.top_ids[places] = ids.reshape(rows, -1)
        result.top_logits[places] = logits.view(np.float32).reshape(rows, -1)
