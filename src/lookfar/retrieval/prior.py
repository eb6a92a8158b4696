"""The prior of a recycle table: what the model predicts after a token alone, without a text before it.

The table knows the tokens that were part of a step. After any other token there would be nothing to draft, and that is
where most drafts end. The prior is computed once for a model, in the order of token ids, and kept in a file: the first
tokens of a vocabulary are the most frequent ones, so a part of it is worth nearly as much as the whole.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.files import replace_file
from lookfar.retrieval.recycle_table import TOP_K, RecycleTable

MAX_LOGIT = 6e4  # that a half-precision number can hold


class RecyclePrior:
    """Predictions after the first `count` tokens of a vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        k = min(TOP_K, vocab_size)
        self.ids: Int32s = np.full((vocab_size, k), -1, np.int32)  # most likely first
        self.logits: Floats = np.zeros((vocab_size, k), np.float32)
        self.count = 0

    @property
    def is_complete(self) -> bool:
        return self.count == len(self.ids)

    def append(self, ids: Int32s, logits: Floats) -> None:
        """Add the predictions after the next tokens, [tokens, k]."""
        end = self.count + len(ids)
        self.ids[self.count : end], self.logits[self.count : end] = ids, np.clip(logits, -MAX_LOGIT, MAX_LOGIT)
        self.count = end

    def fill(self, table: RecycleTable, first: int = 0) -> None:
        """Give the predictions to a table, from token `first` on, where the table has learned nothing yet."""
        table.set_prior(first, self.ids[first : self.count], self.logits[first : self.count])

    def write(self, path: Path) -> None:
        """Write the prior to a file. If that fails, it is computed again by the next process."""
        arrays: dict[str, Any] = {"ids": self.ids[: self.count]}
        arrays["logits"] = self.logits[: self.count].astype(np.float16)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, [save(arrays)])

    @classmethod
    def read(cls, path: Path, vocab_size: int) -> RecyclePrior:
        """Read a prior from a file; empty if there is none, or one that does not fit the vocabulary."""
        prior = cls(vocab_size)
        try:
            kept = load_file(path)
            ids, logits = kept["ids"], kept["logits"].astype(np.float32)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError):
            return prior
        fits = ids.dtype == np.int32 and ids.ndim == 2 and ids.shape == logits.shape and len(ids) <= vocab_size
        fits = fits and ids.shape[1] == prior.ids.shape[1] and bool(np.isfinite(logits).all())
        if fits and ((ids >= 0) & (ids < vocab_size)).all():  # compiled code does not check bounds
            prior.append(ids, logits)
        return prior
