"""The prior fills the rows of a recycle table that nothing was learned for, and survives in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lookfar.retrieval.prior import RecyclePrior
from lookfar.retrieval.recycle_file import export_table
from lookfar.retrieval.recycle_table import NO_CONTEXT, TOP_K, RecycleTable
from lookfar.retrieval.sources import DraftSources

VOCAB = 50


def some_prior(count: int) -> RecyclePrior:
    prior = RecyclePrior(VOCAB)
    ids = (np.arange(count)[:, None] + np.arange(1, TOP_K + 1)) % VOCAB
    prior.append(ids.astype(np.int32), np.tile(-np.arange(TOP_K, dtype=np.float32), (count, 1)))
    return prior


def learn(table: RecycleTable, token: int) -> None:
    top = np.arange(TOP_K, dtype=np.int32)[None]
    table.learn(np.array([-1], np.int32), np.array([token], np.int32), top, np.zeros((1, TOP_K), np.float32))


def test_learned_rows_stay() -> None:
    table = RecycleTable(VOCAB, 16)
    learn(table, 3)
    some_prior(10).fill(table)
    assert table.arrays.token_ids[3, :TOP_K].tolist() == list(range(TOP_K))
    assert table.arrays.token_ids[4, 0] == 5
    assert table.arrays.times[4] == NO_CONTEXT
    assert table.arrays.token_ids[10, 0] < 0  # not computed yet


def test_learning_replaces_the_prior() -> None:
    table = RecycleTable(VOCAB, 16)
    some_prior(10).fill(table)
    learn(table, 4)
    assert table.arrays.token_ids[4, :TOP_K].tolist() == list(range(TOP_K))
    assert table.arrays.times[4] != NO_CONTEXT


def test_a_store_file_leaves_it_out() -> None:
    table = RecycleTable(VOCAB, 16)
    some_prior(10).fill(table)
    learn(table, 4)
    assert export_table(table)["recycle.token.keys"].tolist() == [4]


def test_tables_follow_a_growing_prior() -> None:
    sources, prior = DraftSources(VOCAB), some_prior(10)
    sources.use_prior(prior)
    table = sources.recycle_table
    assert table.arrays.token_ids[9, 0] == 10
    prior.append(np.full((5, TOP_K), 7, np.int32), np.zeros((5, TOP_K), np.float32))
    sources.use_prior(prior)
    assert table.arrays.token_ids[14, 0] == 7
    assert sources.private_table().arrays.token_ids[14, 0] == 7


def test_a_file_round_trip(tmp_path: Path) -> None:
    prior = some_prior(10)
    prior.write(tmp_path / "new" / "prior")
    kept = RecyclePrior.read(tmp_path / "new" / "prior", VOCAB)
    assert kept.count == 10
    assert np.array_equal(kept.ids, prior.ids)
    assert np.array_equal(kept.logits, prior.logits)


@pytest.mark.parametrize("damage", ["missing", "cut", "other vocabulary", "outside", "directory"])
def test_a_file_that_does_not_fit_is_ignored(tmp_path: Path, damage: str) -> None:
    path, prior = tmp_path / "prior", some_prior(VOCAB)
    if damage == "outside":
        prior.ids[3, 2] = VOCAB
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        prior.write(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    assert RecyclePrior.read(path, VOCAB - 1 if damage == "other vocabulary" else VOCAB).count == 0


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    some_prior(3).write(tmp_path / "file" / "prior")  # computed again next time


def test_sources_that_take_the_place_of_others_are_as_ready() -> None:
    old, new = DraftSources(VOCAB), DraftSources(VOCAB)
    new.follow(old)
    assert not new.has_table
    old.use_prior(some_prior(10))
    old.prepare()
    learn(old.recycle_table, 3)
    new.follow(old)
    assert new.has_table
    assert new.recycle_table is not old.recycle_table
    assert new.recycle_table.arrays.token_ids[:11, 0].tolist() == [*range(1, 11), -1]  # of the prior; nothing learned
