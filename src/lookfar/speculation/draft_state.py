"""Draft state: data that requests leave for later requests of a model. It never changes the output."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.recycle_file import FileArrays, export_table, import_table
from lookfar.retrieval.sources import DraftSources
from lookfar.retrieval.store_file import MODEL
from lookfar.speculation.acceptance import LAYOUT, AcceptanceModel

MAX_SOURCES = 16  # of an acceptance model in a file
INITIAL_WINDOW_VALUE = 0.3  # tokens a step that window rows are credited with before they are tried


class DraftState:
    """The sources that drafters share, the acceptance models, and the value of lookahead-window rows."""

    def __init__(self, vocab_size: int, store: DraftStore | None = None) -> None:
        self.sources = DraftSources(vocab_size, store)
        self.window_value = INITIAL_WINDOW_VALUE
        self._acceptance: dict[tuple[tuple[str, ...], bool, bool], AcceptanceModel] = {}
        self.store.companion = self

    @property
    def store(self) -> DraftStore:
        return self.sources.store

    def in_place_of(self, other: DraftState) -> DraftState:
        """Take the place of another state: as ready as it is, and shared as it is, without what it has learned."""
        self.sources.follow(other.sources)
        other.store.hand_over(self.store)
        return self

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

    def export_learned(self) -> dict[str, npt.NDArray[Any]]:
        """Return the recycle table and the acceptance models, to be kept in the store's file."""
        found: dict[str, npt.NDArray[Any]] = {}
        if self.sources.has_table:
            found |= export_table(self.sources.recycle_table)
        for (names, recycles, samples), model in list(self._acceptance.items()):  # the driver may add one
            name = f"{MODEL}{LAYOUT}.{'+'.join(names)}.{int(recycles)}{int(samples)}"
            found |= {f"{name}.{part}": array.copy() for part, array in model.arrays.items()}
        return found

    def import_learned(self, arrays: FileArrays) -> None:
        """Add what `export_learned` returned.

        Models that this process has begun to learn stay as they are, and those with other features are left out.
        """
        if any(name.startswith("recycle.") for name in arrays):
            import_table(self.sources.recycle_table, arrays)
        models = {name.rpartition(".")[0] for name in arrays if name.startswith(f"{MODEL}{LAYOUT}.")}
        for name in models:
            sources, _, kind = name.removeprefix(f"{MODEL}{LAYOUT}.").rpartition(".")
            if kind not in ("00", "01", "10", "11") or sources.count("+") >= MAX_SOURCES:
                continue
            model = AcceptanceModel(tuple(sources.split("+")) if sources else ())
            if model.restore({part: arrays.get(f"{name}.{part}") for part in model.arrays}):
                self._acceptance.setdefault((model.sources, kind[0] == "1", kind[1] == "1"), model)

    def update_window_value(self, gained: int | None) -> None:
        """Learn what window rows bring: the accepted tokens of a step that no other source proposed; None: not fed.

        Windows that do not pay are left out until their credit has recovered, so they are tried again after a while.
        """
        target, rate = (gained, 0.02) if gained is not None else (INITIAL_WINDOW_VALUE, 0.001)
        self.window_value += rate * (target - self.window_value)
