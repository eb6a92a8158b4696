"""The texts of a batch whose rows are reused and moved between steps.

A row is known by its request's id, or by its number; either way its text has to continue the one that was seen last.
Otherwise the request has moved, or it is a new one. A text that leaves the batch has usually ended, so it is learned at
once. It is kept for some calls, because its request may only be waiting for its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Int32s
from lookfar.retrieval.suffix_index import SuffixIndex
from lookfar.speculation.chain_builder import TokenRows

PATIENCE = 8  # calls that a text which has left the batch is kept for


@dataclass(eq=False, slots=True)
class RowText:
    """The text of one request."""

    index: SuffixIndex
    answer_start: int  # the first token that the model chose
    learned: int = 0  # tokens at its beginning that need not be learned any more
    calls_away: int = 0


class RowTexts:
    """Finds the text of each row in every call."""

    def __init__(self, new_index: Callable[[], SuffixIndex], learn: Callable[[RowText], None]) -> None:
        self._new_index = new_index
        self._learn = learn
        self._present: dict[Hashable, RowText] = {}
        self._away: list[RowText] = []

    def match(self, keys: Seq[Hashable], rows: TokenRows, new: Seq[int]) -> list[RowText]:
        """Return the text of each row, given its key and how many of its tokens are new.

        The new tokens are not in the text yet.
        """
        before, self._present = self._present, {}
        found = [before.get(key) for key in keys]
        same = rows.continue_texts(np.array([0 if text is None else text.index.address for text in found]))
        for i, key in enumerate(keys):
            text = found[i]
            if text is not None and same[i]:
                self._present[key] = text
                del before[key]
            else:
                found[i] = None
        left = [*before.values(), *self._away]
        if left or None in found:
            for i, key in enumerate(keys):
                if found[i] is None:
                    found[i] = self._present[key] = self._find(left, rows.text(i), new[i])
            self._away = [text for text in left if self._waits(text)]
        return found  # type: ignore[return-value]

    def _find(self, left: list[RowText], row: Int32s, new: int) -> RowText:
        """Take the text that a row continues from those that are left; otherwise begin one."""
        size = len(row) - new
        for text in left:
            if text.index.size == size and np.array_equal(row[:size], text.index.text):
                left.remove(text)
                text.calls_away = 0
                return text
        return RowText(self._new_index(), size)

    def _waits(self, text: RowText) -> bool:
        """Count a call without a text, which is learned in the first one; whether it is kept."""
        if not text.calls_away:
            self._learn(text)
        text.calls_away += 1
        return text.calls_away <= PATIENCE

    def learn_all(self) -> None:
        """Learn what the texts of the batch hold by now."""
        for text in self._present.values():
            self._learn(text)
