"""Recycled predictions in a file: what is loaded is what was learned, and nothing implausible reaches compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import lookfar
from families import tiny_model
from helpers import reference
from lookfar.errors import StoreError
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.recycle_file import export_table, import_table, plausible_table
from lookfar.retrieval.recycle_table import RecycleTable, find_pair, find_triple, store_prediction
from lookfar.retrieval.store_file import VERSION, StoreHeader, read_store_file, write_store_file
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.evidence import age_of

VOCAB = 50
rows = st.lists(
    st.tuples(*[st.integers(-1, VOCAB - 1)] * 2, st.integers(0, VOCAB - 1), st.integers(1, 24)), min_size=1, max_size=40
)


def learn(table: RecycleTable, first: int, before: int, token: int, k: int, start: int = 0) -> list[int]:
    ids = (np.arange(k, dtype=np.int32)[None] + start) % VOCAB
    logits = np.linspace(9, 1, k, dtype=np.float32)[None]
    store_prediction(tuple(table.arrays), (first, before, token), (ids, logits), 0, (0, 1, table.arrays.clock[0]))
    return ids[0].tolist()  # type: ignore[no-any-return]


def predicted(table: RecycleTable, first: int, before: int, token: int) -> list[list[int]]:
    """The predictions after a token, a pair and a triple, as far as they are known."""
    arrays, found = table.arrays, [table.arrays.token_ids[token]]
    if (slot := find_pair(arrays.pair_keys, before, token)) >= 0:
        found.append(arrays.pair_ids[slot])
    if (slot := find_triple(arrays.triple_keys, first, before, token)) >= 0:
        found.append(arrays.triple_ids[slot])
    return [row[: list(row).index(-1)].tolist() if -1 in row else row.tolist() for row in found]


@given(rows)
@settings(max_examples=40, deadline=None)
def test_a_table_comes_back_as_it_was(learned: list[tuple[int, int, int, int]]) -> None:
    table = RecycleTable(VOCAB, 64)
    for start, (first, before, token, k) in enumerate(learned):
        learn(table, first, before, token, k, start)
    exported = export_table(table)
    assert plausible_table(exported, VOCAB)
    other = RecycleTable(VOCAB, 64)
    import_table(other, exported)
    smaller = RecycleTable(VOCAB, 16)  # of another size: rows may collide, and are never taken for others
    import_table(smaller, exported)
    for first, before, token, _ in learned:
        assert predicted(other, first, before, token) == predicted(table, first, before, token)
        known = predicted(table, first, before, token)
        assert all(row in known for row in predicted(smaller, first, before, token))


def test_rows_that_a_file_cannot_hold_are_left_out() -> None:
    """A model's logits may be NaN; the store's file stays readable."""
    table = RecycleTable(VOCAB, 64)
    learn(table, 1, 2, 3, 4)
    learn(table, 4, 5, 6, 4)
    table.arrays.token_logits[3, 1] = np.nan
    exported = export_table(table)
    assert plausible_table(exported, VOCAB)
    assert exported["recycle.token.keys"].tolist() == [6]


def test_rows_of_a_file_are_old() -> None:
    table, other = RecycleTable(VOCAB, 64), RecycleTable(VOCAB, 64)
    learn(table, 1, 2, 3, 4)
    import_table(other, export_table(table))
    now, times = other.arrays.clock[0], other.arrays.times
    assert [age_of(time, now) for time in times[times != 0]] == [3, 3, 3]


def test_an_empty_table_and_an_empty_file() -> None:
    exported = export_table(RecycleTable(VOCAB, 8))
    assert plausible_table(exported, VOCAB)
    import_table(RecycleTable(VOCAB, 8), exported)


DAMAGE: list[tuple[str, Any]] = [
    ("recycle.token.keys", lambda a: np.full_like(a, VOCAB)),
    ("recycle.token.keys", lambda a: np.full_like(a, -1)),
    ("recycle.token.keys", lambda a: a.astype(np.int32)),
    ("recycle.token.ids", lambda a: np.full_like(a, VOCAB)),
    ("recycle.pair.ids", lambda a: np.full_like(a, -2)),
    ("recycle.pair.ids", lambda a: np.full_like(a, -1)),
    ("recycle.pair.keys", lambda a: np.full_like(a, VOCAB << 32)),
    ("recycle.pair.keys", lambda a: a[:-1]),
    ("recycle.triple.keys", lambda a: np.full_like(a, -5)),
    ("recycle.triple.logits", lambda a: np.full_like(a, np.nan)),
    ("recycle.triple.logits", lambda a: a[:, :-1]),
    ("recycle.triple.ids", lambda a: a.reshape(-1)),
    ("recycle.triple.ids", None),
    ("recycle.other", lambda a: np.zeros(3, np.int32)),
]


@pytest.mark.parametrize(("name", "change"), DAMAGE, ids=range(len(DAMAGE)))
def test_what_compiled_code_would_misread_is_refused(tmp_path: Path, name: str, change: Any) -> None:
    state, path = DraftState(VOCAB), tmp_path / "a.store"
    learn(state.sources.recycle_table, 1, 2, 3, 8)
    contents = state.store.contents()
    arrays = dict(contents.beside)
    if change is None:
        del arrays[name]
    else:
        arrays[name] = change(arrays.get(name))
    write_store_file(path, StoreHeader(VERSION, VOCAB, ""), contents._replace(beside=arrays))
    with pytest.raises(StoreError, match="damaged"):
        DraftState(VOCAB).store.load(path)


def test_a_changed_byte_of_the_predictions_is_noticed(tmp_path: Path) -> None:
    state, path = DraftState(VOCAB), tmp_path / "a.store"
    learn(state.sources.recycle_table, 1, 2, 3, 8)
    state.store.save(path)
    data = path.read_bytes()
    for at in range(len(data) - 200, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(StoreError):
            DraftState(VOCAB).store.load(path)


def test_files_of_version_2_still_load(tmp_path: Path) -> None:
    store = DraftStore(VOCAB)
    store.learn([[1, 2, 3, 4]])
    write_store_file(tmp_path / "old.store", StoreHeader(2, VOCAB, ""), store.contents())
    state = DraftState(VOCAB)
    state.store.load(tmp_path / "old.store")
    assert state.store.tokens == 4
    assert not state.sources.has_table
    write_store_file(tmp_path / "new.store", StoreHeader(9, VOCAB, ""), store.contents())
    with pytest.raises(StoreError, match="reads 2 to 3"):
        state.store.load(tmp_path / "new.store")


def test_predictions_and_acceptance_models_travel_with_a_store(tmp_path: Path) -> None:
    model = tiny_model("llama")
    lm = lookfar.LM(model, budget=16)
    prompt = [5, 6, 7, 8, 9, 10]
    expected = reference(model, prompt, 32)
    assert lm.generate(prompt, max_new_tokens=32).token_ids == expected
    lm.store.save(tmp_path / "a.store")
    _, contents = read_store_file(tmp_path / "a.store")
    assert len(contents.beside["recycle.pair.keys"]) > 10
    other = lookfar.LM(model, budget=16, store=tmp_path / "a.store")
    (ours,), (theirs,) = lm.draft_state.acceptance_models, other.draft_state.acceptance_models
    assert ours.sources == theirs.sources
    assert all((ours.arrays[name] == theirs.arrays[name]).all() for name in ours.arrays)
    exported, again = lm.draft_state.export_learned(), other.draft_state.export_learned()
    assert exported.keys() == again.keys()
    other.store.index.extend([-1])
    assert other.generate([*prompt, *expected[:3]], max_new_tokens=20).token_ids == expected[3:23]
    silent = lookfar.LM(model, budget=16, remember=False)
    silent.generate(prompt, max_new_tokens=8)
    assert not silent.draft_state.sources.has_table  # what a silent request predicted is not kept


def test_weights_of_another_layout_or_kind_are_left_out() -> None:
    state = DraftState(VOCAB)
    state.acceptance(("suffix", "store"), True, False).weights[3] = 7.0
    exported = state.export_learned()
    (name,) = [name for name in exported if name.endswith(".weights")]
    for changed in (
        {name: exported[name][:-1]},
        {name: np.full_like(exported[name], np.inf)},
        {name: exported[name].astype(np.float64)},
        {name.replace("weights", "squares"): np.zeros_like(exported[name])},
    ):
        other = DraftState(VOCAB)
        other.import_learned({**exported, **changed})
        assert not other.acceptance_models
    other = DraftState(VOCAB)
    other.import_learned({name.replace("acceptance.", "acceptance.9"): array for name, array in exported.items()})
    assert not other.acceptance_models
    other.import_learned(exported)
    assert other.acceptance(("suffix", "store"), True, False).weights[3] == 7.0
