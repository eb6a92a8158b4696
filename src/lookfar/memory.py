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
HOPED_OF_RIDERS = 0.3  # tokens a step that riders get credit for before they are tried, and again after a long rest


class Memory:
    """Shared by all requests of one model. Nothing in it can change a token: it only makes guesses better."""

    def __init__(self, vocab_size: int, store: Store | None = None) -> None:
        self.store = store or Store(vocab_size)
        self.vocab_size = vocab_size
        self.rider_value = HOPED_OF_RIDERS
        self.draft_models: dict[object, BoundModel] = {}  # smaller models that guess, by what they were asked for as
        self._successors: Successors | None = None
        self._calibrations: dict[tuple[tuple[str, ...], bool, bool], Calibration] = {}

    def judge_riders(self, brought: int | None) -> None:
        """Learn what rider rows bring: the accepted tokens of a step that nobody else offered; None if none rode.

        Riders that do not pay rest until the hope in them is back, so they are tried again once in a long while.
        """
        target, rate = (brought, 0.02) if brought is not None else (HOPED_OF_RIDERS, 0.001)
        self.rider_value += rate * (target - self.rider_value)

    @property
    def successors(self) -> Successors:
        """Made when first asked for, since it takes memory for every token of the vocabulary."""
        if self._successors is None:
            self._successors = Successors(self.vocab_size, PAIRS)
        return self._successors

    def calibration(self, sources: Seq[str], recycled: bool, sampled: bool) -> Calibration:
        """How good the drafts of these sources are, with recycled predictions or without, sampled or not."""
        key = tuple(sources), recycled, sampled
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(sources)
        return self._calibrations[key]
