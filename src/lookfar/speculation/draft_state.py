"""Draft state: data that requests leave for later requests of a model. It never changes the output."""

from __future__ import annotations

from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.sources import DraftSources
from lookfar.speculation.acceptance import AcceptanceModel

INITIAL_WINDOW_VALUE = 0.3  # tokens a step that window rows are credited with before they are tried


class DraftState:
    """The sources that drafters share, the acceptance models, and the value of lookahead-window rows."""

    def __init__(self, vocab_size: int, store: DraftStore | None = None) -> None:
        self.sources = DraftSources(vocab_size, store)
        self.window_value = INITIAL_WINDOW_VALUE
        self._acceptance: dict[tuple[tuple[str, ...], bool, bool], AcceptanceModel] = {}

    @property
    def store(self) -> DraftStore:
        return self.sources.store

    def fit(self, vocab_size: int) -> None:
        """Follow a change of the vocabulary."""
        if vocab_size != self.sources.vocab_size:
            self.store.vocab_size = vocab_size
            self.sources = DraftSources(vocab_size, self.store)

    def acceptance(self, names: tuple[str, ...], recycles: bool, samples: bool) -> AcceptanceModel:
        """Return the acceptance model of requests with these sources, with a recycle table or not, sampled or not."""
        key = names, recycles, samples
        if key not in self._acceptance:
            self._acceptance[key] = AcceptanceModel(names)
        return self._acceptance[key]

    @property
    def acceptance_models(self) -> list[AcceptanceModel]:
        """All models so far, to read their weights."""
        return list(self._acceptance.values())

    def update_window_value(self, gained: int | None) -> None:
        """Learn what window rows bring: the accepted tokens of a step that no other source proposed; None: not fed.

        Windows that do not pay are left out until their credit has recovered, so they are tried again after a while.
        """
        target, rate = (gained, 0.02) if gained is not None else (INITIAL_WINDOW_VALUE, 0.001)
        self.window_value += rate * (target - self.window_value)
