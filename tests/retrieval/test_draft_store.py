"""The draft store: learned, saved, loaded; a file that is damaged or not ours is refused in one sentence."""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

import lookfar
from families import tiny_model
from helpers import byte_tokenizer
from lookfar.errors import StoreError
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.store_file import VERSION, StoreHeader, read_store_file, write_store_file
from lookfar.retrieval.suffix_index import END
from lookfar.retrieval.trie import COUNT

TEXT = [5, 6, 7, 8, 9, 5, 6, 7, 1]


def tail(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def made() -> DraftStore:
    store = DraftStore(100)
    store.learn([TEXT, [5, 6, 2]])
    return store


def same(one: DraftStore, other: DraftStore) -> bool:
    ours, theirs = one.contents(), other.contents()
    paths = []
    for contents in (ours, theirs):
        spelled: list[tuple[int, ...]] = [()]
        for token, parent in zip(contents.tokens.tolist(), contents.parents.tolist(), strict=True):
            spelled.append((*spelled[parent], token))
        paths.append(dict(zip(spelled[1:], contents.counts.tolist(), strict=True)))
    return ours.text.tolist() == theirs.text.tolist() and paths[0] == paths[1]


def test_learning_feeds_both_indexes() -> None:
    store = made()
    assert store.tokens == len(TEXT) + 3
    drafts, matched = store.find(tail(5, 6), limit=8, depth=2)
    assert sorted(drafts.tolist()) == [[2, -1], [7, 1], [7, 8]]
    assert matched.tolist() == [2, 2, 2]
    node = store.trie.find(tail(5, 6, 7))
    assert store.trie.arrays.nodes[node, COUNT] == 2


def test_what_can_be_learned() -> None:
    store = DraftStore(300, byte_tokenizer())
    assert store.learn("hello") == 5
    assert store.learn(["hello", "world"]) == 10
    assert store.learn([1, 2, 3]) == 3
    assert store.learn(np.array([[1, 2], [3, 4]])) == 4
    assert store.learn([]) == 0
    for wrong, message in (
        ([[1, 300]], "outside the vocabulary"),
        ([[1, -1]], "outside the vocabulary"),
        ([[1.5]], "nothing else"),
        ([{"a": 1}], "nothing else"),
    ):
        with pytest.raises(StoreError, match=message):
            store.learn(wrong)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="needs a tokenizer"):
        DraftStore(300).learn("hello")


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    store, path = made(), tmp_path / "a.store"
    store.save(path)
    other = DraftStore(100)
    other.load(path)
    assert same(store, other)
    other.load(path)  # loading adds
    assert other.tokens == 2 * store.tokens
    assert other.trie.arrays.nodes[other.trie.find(tail(5, 6, 7)), COUNT] == 4
    header, _ = read_store_file(path)
    assert header == StoreHeader(VERSION, 100, "")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not a lookfar store, or it is cut short"),
        (lambda data: b"PK\x03\x04" + data, "not a lookfar store, or it is cut short"),
        (lambda data: data[:-1], "cut short or damaged"),
        (lambda data: data[:20], "cut short or damaged"),
        (lambda data: data[: len(data) // 2], "cut short or damaged"),
        (lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], "cut short or damaged"),
        (lambda data: data + b"x", "cut short or damaged"),
        (lambda data: data.replace(b'"version":"3"', b'"version":"9"'), "version 9 of the format.*upgrade"),
        (lambda data: data.replace(b'"vocab_size":"100"', b'"vocab_size":"abc"'), "damaged"),
        (lambda data: data.replace(b"lookfar draft store", b"another format here"), "not a lookfar store: make one"),
        (lambda data: (2**62).to_bytes(8, "little") + data[8:], "cut short or damaged"),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.store"
    made().save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=message):
        DraftStore(100).load(path)


def test_numbers_that_point_outside_are_refused_even_with_a_right_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    for name, value in (("text", 1000), ("tokens", -5), ("parents", 10**6), ("counts", 0)):
        contents = made().contents()
        getattr(contents, name)[0] = value
        write_store_file(path, StoreHeader(VERSION, 100, ""), contents)
        with pytest.raises(StoreError, match="damaged"):
            DraftStore(100).load(path)
    for changed in ({"text": np.zeros(3, np.int64)}, {"counts": np.ones((2, 2), np.int32)}):
        write_store_file(path, StoreHeader(VERSION, 100, ""), made().contents()._replace(**changed))
        with pytest.raises(StoreError, match="damaged"):
            DraftStore(100).load(path)


def test_another_vocabulary_or_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    made().save(path)
    with pytest.raises(StoreError, match="vocabulary of 100 tokens and this model has 99"):
        DraftStore(99).load(path)
    tokenizer, other = byte_tokenizer(), byte_tokenizer()
    other.add_tokens(["new"])
    DraftStore(300, tokenizer).save(path)
    DraftStore(300, byte_tokenizer()).load(path)
    with pytest.raises(StoreError, match="another tokenizer"):
        DraftStore(300, other).load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.store"
    made().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    bigger = made()
    bigger.learn([list(range(90))])
    with pytest.raises(StoreError, match="cannot be written: No space left"):
        bigger.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.store"]
    monkeypatch.undo()
    with pytest.raises(StoreError, match="cannot be written"):
        bigger.save(tmp_path / "nowhere" / "a.store")
    with pytest.raises(StoreError, match="cannot be read"):
        bigger.load(tmp_path / "nothing")


def test_it_stays_within_its_bounds_in_a_long_run() -> None:
    store = DraftStore(5000, max_tokens=20_000, max_nodes=30_000)
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(300):
        store.learn([rng.integers(0, 5000, 500)])
        sizes.append(store.nbytes)
        assert store.tokens <= 20_000
        assert store.trie.size <= 30_000
    assert max(sizes[100:]) == max(sizes[200:])  # it stopped growing
    assert max(sizes) < 4 * 20_000 * 8 + 4 * 30_000 * 10


def test_readers_and_a_writer_at_once() -> None:
    store = DraftStore(1000, max_tokens=5000, max_nodes=5000)
    store.learn([TEXT])
    done, errors = threading.Event(), []

    def read() -> None:
        own = store.trie.__class__(4, 100)
        while not done.is_set():
            try:
                drafts, matched = store.find(tail(5, 6), limit=8, depth=4)
                assert (drafts < 1000).all()
                assert (matched >= 2).all()
                tokens, parents, _, _ = store.branches(tail(5), 1.0, own, 0.0, (16, 4))
                assert (tokens >= 0).all()
                assert (parents < np.arange(len(parents))).all()
                store.contents()
            except Exception as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    rng = np.random.default_rng(0)
    for _ in range(300):
        store.learn([[5, 6, *rng.integers(0, 1000, 60).tolist()]])
    done.set()
    for reader in readers:
        reader.join()
    assert not errors


def test_an_lm_learns_saves_and_loads(tmp_path: Path) -> None:
    model = tiny_model("llama")
    lm = lookfar.LM(model, budget=16)
    prompt = [5, 6, 7, 8, 9, 10]
    cold = lm.generate(prompt, max_new_tokens=24)
    warm = lm.generate(prompt, max_new_tokens=24)
    assert warm.token_ids == cold.token_ids
    assert warm.stats.steps < cold.stats.steps
    lm.store.save(tmp_path / "a.store")
    other = lookfar.LM(model, budget=16, store=tmp_path / "a.store")
    loaded = other.generate(prompt, max_new_tokens=24)
    assert loaded.token_ids == cold.token_ids
    assert loaded.stats.steps < cold.stats.steps
    other.forget()
    assert other.store.tokens == 0
    silent = lookfar.LM(model, remember=False)
    silent.generate(prompt, max_new_tokens=24)
    assert silent.store.tokens == 0
    assert silent.store.contents().text.tolist() == []
    assert END not in lm.generate(prompt, max_new_tokens=4).token_ids


@pytest.mark.slow
def test_ten_million_tokens_stay_within_bounds() -> None:
    """docs/benchmarks.md states them."""
    store = DraftStore(50_000)
    texts = (np.random.default_rng(0).zipf(1.3, 1_000_000) % 50_000).reshape(-1, 10_000).astype(np.int32)
    store.learn(texts[:1])  # compiles
    began = perf_counter()
    for number in range(10):
        for text in texts:
            store.add((text + number) % 50_000)
    for text in texts[:20]:
        store.count(text)
    assert perf_counter() - began < 60  # about 10 on an idle machine
    assert 2_000_000 < store.tokens <= 4 << 20
    assert store.nbytes < 250e6
    began = perf_counter()
    for text in texts:
        store.find(text[:40], 16, 24)
    assert (perf_counter() - began) / len(texts) < 0.005


def test_a_small_store_stays_small() -> None:
    store = DraftStore(1000, max_tokens=1 << 10, max_nodes=1 << 10)
    for seed in range(50):
        store.learn(np.random.default_rng(seed).integers(0, 1000, 300).tolist())
    assert store.tokens <= 1 << 10
    assert store.nbytes < 200_000


NESTED = b"[" * 50_000
HEADERS = [
    b"{}",
    b'{"__metadata__": ' + NESTED,
    b'{"__metadata__": {"format": "lookfar draft store", "version": "2", "vocab_size": "1e999", "tokenizer": ""}}',
    b'{"text": {"dtype": "I32", "shape": [Infinity], "data_offsets": [0, 4]}}',
    b'{"text": {"dtype": "I32", "shape": [18446744073709551615, 4], "data_offsets": [0, 4]}}',
    b'{"text": {"dtype": "I32", "shape": [1e400], "data_offsets": [NaN, 4]}}',
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_headers_that_mean_harm_are_one_sentence(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "bad.store"
    for size in (len(header), 2**63, 0, len(header) // 2):
        path.write_bytes(size.to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(StoreError, match=r"\.$") as caught:
            read_store_file(path)
        assert "\n" not in str(caught.value)


def test_a_directory_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a directory"):
        read_store_file(tmp_path)


def test_a_vocabulary_beyond_all_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    contents = made().contents()
    for size in (10**30, -1):
        write_store_file(path, StoreHeader(VERSION, size, ""), contents)
        with pytest.raises(StoreError):
            DraftStore(100).load(path)
