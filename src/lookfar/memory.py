"""What a model's requests leave behind for later ones: the store, recycled predictions, how good guesses were."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from lookfar.calibration import Calibration
from lookfar.store import Store
from lookfar.successors import Successors

if TYPE_CHECKING:
    from lookfar.model import BoundModel

PAIRS = 1 << 16


class Memory:
    """Shared by all requests of one model. Nothing in it can change a token: it only makes guesses better."""

    def __init__(self, vocab_size: int, store: Store | None = None) -> None:
        self.store = store or Store(vocab_size)
        self.vocab_size = vocab_size
        self.rider_value = 0.3  # tokens that a sequence's riders bring to a later step: a guess, then measured
        self.draft_models: dict[object, BoundModel] = {}  # smaller models that guess, by what they were asked for as
        self._successors: Successors | None = None
        self._calibrations: dict[tuple[tuple[str, ...], bool], Calibration] = {}

    @property
    def successors(self) -> Successors:
        """Made when first asked for, since it takes memory for every token of the vocabulary."""
        if self._successors is None:
            self._successors = Successors(self.vocab_size, PAIRS)
        return self._successors

    def calibration(self, sources: Seq[str], recycled: bool) -> Calibration:
        """How good the drafts of these sources are, together with recycled predictions or without."""
        key = tuple(sources), recycled
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(sources)
        return self._calibrations[key]
