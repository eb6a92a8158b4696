"""A recycle table as arrays for a file: only the rows that are filled, each with the tokens that it belongs to.

Compiled code does not check bounds, so everything that a file brings in is checked here, and slots are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lookfar.core.arrays import Bools, Floats, Int32s, Ints
from lookfar.core.jit import jit
from lookfar.retrieval.recycle_table import NO_CONTEXT, RecycleTable, pair_slot

FileArrays = Mapping[str, npt.NDArray[Any]]
KINDS = ("token", "pair", "triple")
TABLE_ARRAYS = 3 * len(KINDS)
MAX_LOGIT = 6e4  # that a half-precision number can hold
OLD = -1024  # when rows of a file were learned, in steps before the first one


def export_table(table: RecycleTable) -> dict[str, npt.NDArray[Any]]:
    """Return the filled rows: their keys, predictions and logits, without the columns that no row uses."""
    found: dict[str, npt.NDArray[Any]] = {}
    vocab_size = len(table.arrays.token_ids)
    for kind, (keys, ids, logits) in zip(KINDS, _rows_of(table), strict=True):
        own_keys, own, own_logits = keys.copy(), ids.copy(), logits.copy()  # the driver may be learning
        behind_end = np.logical_or.accumulate(own < 0, axis=1)
        own_logits[behind_end] = 0
        filled = _known(kind, own_keys, vocab_size) & (own[:, 0] >= 0) & (own < vocab_size).all(1)
        filled &= np.isfinite(own_logits).all(1)
        if kind == "token":
            filled &= table.arrays.times[:vocab_size] != NO_CONTEXT  # the prior has a file of its own
        behind_end = behind_end[filled]
        width = int((~behind_end).any(0).sum()) if len(behind_end) else 0
        found[f"recycle.{kind}.keys"] = own_keys[filled]
        found[f"recycle.{kind}.ids"] = np.where(behind_end, -1, own[filled])[:, :width]
        limited = np.clip(own_logits[filled], -MAX_LOGIT, MAX_LOGIT)
        found[f"recycle.{kind}.logits"] = limited[:, :width].astype(np.float16)
    return found


def import_table(table: RecycleTable, arrays: FileArrays) -> None:
    """Add the rows of `export_table`, which must be plausible, to a table. They count as old."""
    first_time = 0
    for kind, (keys, ids, logits) in zip(KINDS, _rows_of(table), strict=True):
        new = arrays[f"recycle.{kind}.keys"]
        if kind == "token":
            slots: Ints = new
        elif kind == "pair":
            slots = slots_of_pairs(new, len(keys))
            keys[slots] = new
        else:
            slots = new & (len(keys) - 1)
            keys[slots] = new
        width = min(arrays[f"recycle.{kind}.ids"].shape[1], ids.shape[1])
        ids[slots] = -1
        ids[slots, :width] = arrays[f"recycle.{kind}.ids"][:, :width]
        logits[slots, :width] = arrays[f"recycle.{kind}.logits"][:, :width]
        table.arrays.times[first_time + slots] = OLD
        first_time += len(keys)


def plausible_table(arrays: FileArrays, vocab_size: int) -> bool:
    """Whether arrays are those of a table of a model with so many tokens."""
    if {f"recycle.{kind}.{part}" for kind in KINDS for part in ("keys", "ids", "logits")} - set(arrays):
        return False
    for kind in KINDS:
        keys, ids, logits = (arrays[f"recycle.{kind}.{part}"] for part in ("keys", "ids", "logits"))
        if keys.dtype != np.int64 or ids.dtype != np.int32 or logits.dtype != np.float16:
            return False
        if keys.ndim != 1 or ids.ndim != 2 or ids.shape != logits.shape or len(ids) != len(keys):
            return False
        if len(keys) and not (ids.shape[1] and _known(kind, keys, vocab_size).all() and np.isfinite(logits).all()):
            return False
        if len(keys) and not (((ids >= -1) & (ids < vocab_size)).all() and (ids[:, 0] >= 0).all()):
            return False
    return True


def _known(kind: str, keys: Ints, vocab_size: int) -> Bools:
    """Return which keys can belong to a table."""
    if kind == "token":
        return (keys >= 0) & (keys < vocab_size)
    if kind == "pair":
        return (keys >= 0) & (keys >> 32 < vocab_size) & (keys & 0xFFFFFFFF < vocab_size)
    return keys >= 0


def _rows_of(table: RecycleTable) -> list[tuple[Ints, Int32s, Floats]]:
    """Return the keys, predictions and logits of tokens, pairs and triples."""
    arrays = table.arrays
    return [
        (np.arange(len(arrays.token_ids), dtype=np.int64), arrays.token_ids, arrays.token_logits),
        (arrays.pair_keys, arrays.pair_ids, arrays.pair_logits),
        (arrays.triple_keys, arrays.triple_ids, arrays.triple_logits),
    ]


@jit
def slots_of_pairs(keys, slots):  # type: ignore[no-untyped-def]
    found = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        found[i] = pair_slot(keys[i] >> 32, keys[i] & 0xFFFFFFFF, slots)
    return found
