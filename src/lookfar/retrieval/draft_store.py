"""The draft store: past texts that outlive a request and a process, in a suffix index and a trie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lookfar.core.arrays import Floats, Int32s
from lookfar.core.jit import is_disabled
from lookfar.core.locks import fork_safe_lock
from lookfar.errors import ConfigError, StoreError
from lookfar.retrieval.provenance import Provenance
from lookfar.retrieval.recycle_file import FileArrays
from lookfar.retrieval.store_file import (
    VERSION,
    StoreContents,
    StoreHeader,
    read_store_file,
    tokenizer_fingerprint,
    write_store_file,
)
from lookfar.retrieval.suffix_index import END, FollowedTexts, Matches, SuffixIndex
from lookfar.retrieval.trie import CountedNodes, CountedTrie

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 4 << 20  # 28 bytes each with the hash chains; beyond that the older half is dropped
ROOM = 1 << 16  # tokens that there is room for at first
MAX_NODES = 2 << 20  # 40 bytes each with the hash table; beyond that counts are halved
BRANCH_LENGTH = 13  # a token and what followed it, as deep as the trie goes
CHAINED_LENGTHS = (8, 4, 2)
IN_INDEX, IN_TRIE = 1, 2  # where a shared text belongs


class StoreSharing(Protocol):
    """The connection of a store to those of other replicas (`lookfar.sharing`)."""

    def publish(self, use: int, ids: Seq[int]) -> None:
        """Tell other replicas about a text; `use` is `IN_INDEX`, `IN_TRIE` or their sum. Returns at once."""

    def move_to(self, store: DraftStore) -> None:
        """Share another store from now on."""


class StoreCompanion(Protocol):
    """What drafters learn beside the texts of a store; it travels in the store's file (`DraftState`)."""

    def export_learned(self) -> FileArrays:
        """Return a copy as arrays, by name."""

    def import_learned(self, arrays: FileArrays) -> None:
        """Add what a file holds. Arrays of another version are ignored."""


class DraftStore:
    """Past texts to draft from. Thread-safe: every look-up and every change holds one lock, briefly."""

    def __init__(
        self,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        max_nodes: int = MAX_NODES,
    ) -> None:
        if is_disabled():
            raise ConfigError("NUMBA_DISABLE_JIT is set, and lookfar's host code runs only compiled: unset it.")
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.index = SuffixIndex(max_tokens, CHAINED_LENGTHS, ROOM)
        self.trie = CountedTrie(BRANCH_LENGTH, max_nodes)
        self.provenance = Provenance()
        self.sharing: StoreSharing | None = None
        self.companion: StoreCompanion | None = None
        self._lock = fork_safe_lock()

    @property
    def tokens(self) -> int:
        """The number of stored tokens."""
        return int((self.index.text != END).sum())

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.trie.nbytes

    def learn(self, texts: str | Iterable[str] | Seq[int] | Iterable[Seq[int]]) -> int:
        """Add texts, or lists of token ids, to draft from; return the number of tokens."""
        count = 0
        for ids in self._as_ids(texts):
            with self._lock:
                self.index.extend([*ids, END])
                self.trie.insert(ids)
                self.share(ids, IN_INDEX + IN_TRIE)
            count += len(ids)
        return count

    def _as_ids(self, texts: Any) -> Iterable[Seq[int]]:
        if isinstance(texts, str):
            texts = [texts]
        texts = list(texts)
        if texts and all(isinstance(item, (int, np.integer)) for item in texts):
            texts = [texts]
        for text in texts:
            if isinstance(text, str):
                if self.tokenizer is None:
                    raise StoreError("Learning from texts needs a tokenizer: give lists of token ids instead.")
                text = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            ids = np.asarray(text)
            if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
                raise StoreError("A store learns from texts or lists of token ids, and nothing else.")
            if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocab_size):
                raise StoreError(f"A token id is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}.")
            if len(ids):
                yield ids.tolist()

    def add(self, ids: Seq[int]) -> None:
        """Add a text to the suffix index, here and in other replicas. It must not change afterwards."""
        with self._lock:
            self.index.extend([*ids, END])
            self.share(ids, IN_INDEX)

    def count(self, ids: Seq[int], until: int | None = None) -> None:
        """Count the branches of a text in the trie, or those that start before `until`."""
        with self._lock:
            self.trie.insert(ids, until)

    def share(self, ids: Seq[int], use: int) -> None:
        """Publish a text that was learned, if the store is shared."""
        with self._lock:
            if self.sharing is not None:
                self.sharing.publish(use, ids)

    def hand_over(self, store: DraftStore) -> None:
        """Let another store be shared instead of this one."""
        with self._lock:
            if self.sharing is not None:
                self.sharing.move_to(store)

    def receive(self, ids: Seq[int] | Int32s, use: int, origin: str, number: int) -> bool:
        """Learn a text that another replica published; returns whether it was new."""
        with self._lock:
            if not self.provenance.accept(origin, number):
                return False
            if use & IN_INDEX:
                self.index.extend(np.append(ids, np.int32(END)))
            if use & IN_TRIE:
                self.trie.insert(ids)
        return True

    def find(self, tail: Int32s, limit: int, depth: int) -> tuple[Int32s, Int32s]:
        """Return continuations of the longest suffixes of `tail`, and the lengths of their matches."""
        with self._lock:
            return self.index.find(tail, limit, depth)

    def find_all(self, followed: FollowedTexts, texts: Seq[Seq[int]], wanted: Int32s) -> Matches:
        """Return continuations of the ends of several texts, in themselves and in the store (`FollowedTexts.find`)."""
        with self._lock:
            return followed.find(texts, wanted, self.index)

    @contextmanager
    def locked_index(self) -> Iterator[SuffixIndex]:
        """Hold the lock, for compiled code that looks up several texts in one call."""
        with self._lock:
            yield self.index

    def branches(
        self, suffix: Int32s, weight: float, own: CountedTrie, own_weight: float, limits: tuple[int, int]
    ) -> tuple[Int32s, Int32s, Int32s, Floats]:
        """Return the most frequent nodes after `suffix` here and in a request's own trie (`best_branches`)."""
        with self._lock:
            return self.trie.best_branches(suffix, weight, own, own_weight, limits)

    def contents(self) -> StoreContents:
        """Return a copy of what a file holds."""
        return self._snapshot()[0]

    def _snapshot(self) -> tuple[StoreContents, str]:
        """Return a copy of what a file holds, and which shared texts are among it, of one moment."""
        beside = self.companion.export_learned() if self.companion is not None else {}
        with self._lock:
            return StoreContents(self.index.text.copy(), *self.trie.counted(), beside), self.provenance.dumps()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the store to a file; a file that is there already is replaced in one move."""
        contents, learned = self._snapshot()
        header = StoreHeader(VERSION, self.vocab_size, tokenizer_fingerprint(self.tokenizer), learned)
        write_store_file(Path(path), header, contents)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add the contents of a file to this store."""
        header, contents = read_store_file(Path(path))
        if header.vocab_size != self.vocab_size:
            raise StoreError(
                f"{path} was made for a vocabulary of {header.vocab_size} tokens and this model has "
                f"{self.vocab_size}: build it again with this model's tokenizer."
            )
        fingerprint = tokenizer_fingerprint(self.tokenizer)
        if fingerprint and header.tokenizer and header.tokenizer != fingerprint:
            raise StoreError(f"{path} was made with another tokenizer: build it again with this model's.")
        self.merge(contents, header.learned)

    def merge(self, contents: StoreContents, learned: str = "") -> None:
        """Add the contents of another store. `learned` says which shared texts it holds."""
        with self._lock:
            self.provenance.loads(learned)
            self.index.extend(contents.text)
            self.trie.merge(CountedNodes(contents.tokens, contents.parents, contents.counts))
            if self.companion is not None and contents.beside:
                self.companion.import_learned(contents.beside)
