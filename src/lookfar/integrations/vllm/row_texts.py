"""The texts of a batch whose rows are reused and moved between steps.

A row is known by its request's id, or by its number; either way its text has to continue the one that was seen last.
Otherwise the request has moved, or it is a new one. A text that leaves the batch has usually ended, so it is learned at
once. It is kept for some calls, because its request may only be waiting for its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from lookfar.core.arrays import Int32s
from lookfar.retrieval.suffix_index import SuffixIndex

PATIENCE = 8  # calls that a text which has left the batch is kept for


@dataclass(eq=False, slots=True)
class RowText:
    """The text of one request."""

    index: SuffixIndex
    answer_start: int  # the first token that the model chose
    learned: int = 0  # tokens at its beginning that need not be learned any more
    calls_away: int = 0

    def continues_in(self, row: Int32s) -> bool:
        """Whether a row starts with this text."""
        return self.index.size <= len(row) and np.array_equal(row[: self.index.size], self.index.text)


class RowTexts:
    """Finds the text of each row in every call."""

    def __init__(self, new_index: Callable[[], SuffixIndex], learn: Callable[[RowText], None]) -> None:
        self._new_index = new_index
        self._learn = learn
        self._present: dict[Hashable, RowText] = {}
        self._away: list[RowText] = []

    def match(self, rows: Iterable[tuple[Hashable, Int32s, int]]) -> list[RowText]:
        """Return the text of each row, given its key, its tokens and how many of them are new.

        The new tokens are not in the text yet.
        """
        before, found = self._present, []
        self._present = {}
        unknown = []
        for place, (key, row, new) in enumerate(rows):
            text = before.get(key)
            if text is not None and text.continues_in(row):
                self._present[key] = text
                del before[key]
            else:
                text = None
                unknown.append((place, key, row, new))
            found.append(text)
        left = [*before.values(), *self._away]
        for place, key, row, new in unknown:
            text = next((each for each in left if each.index.size == len(row) - new and each.continues_in(row)), None)
            if text is not None:
                left.remove(text)
            else:
                text = RowText(self._new_index(), len(row) - new)
            text.calls_away = 0
            found[place] = self._present[key] = text
        self._away = [text for text in left if self._waits(text)]
        return found  # type: ignore[return-value]

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
