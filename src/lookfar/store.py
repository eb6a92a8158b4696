"""Past texts that outlive a request and a process: a trie with counts and an index for suffixes, and their file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence as Seq
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from lookfar.arrays import Floats, Int32s
from lookfar.errors import StoreError
from lookfar.files import replace_file
from lookfar.index import END, TokenIndex
from lookfar.trie import CountedTrie, best_branches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_TOKENS = 4 << 20  # 28 bytes each with the chains; beyond that the older half is forgotten
MAX_NODES = 2 << 20  # 40 bytes each with the hash table; beyond that counts are halved
BRANCH = 13  # a token and what followed it, as deep as the trie goes
CHAINED = (8, 4, 2)
EMPTY = CountedTrie(1, 2)

MAGIC = b"lookfar store\n"
VERSION = 1


class Store:
    """Safe for several readers and a writer in one process: every look-up and every change holds one lock, briefly."""

    def __init__(
        self,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        max_nodes: int = MAX_NODES,
    ) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.index = TokenIndex(max_tokens, CHAINED)
        self.trie = CountedTrie(BRANCH, max_nodes)
        self._lock = RLock()

    @property
    def tokens(self) -> int:
        """How many tokens of text are stored."""
        return int((self.index.text != END).sum())

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.trie.nbytes

    def learn(self, texts: str | Iterable[str] | Seq[int] | Iterable[Seq[int]]) -> int:
        """Take in texts, or lists of token ids, to guess from; returns the number of tokens."""
        count = 0
        for ids in self._as_ids(texts):
            self.add(ids)
            self.count(ids)
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
        """Index a text for suffix matches."""
        with self._lock:
            self.index.extend([*ids, END])

    def count(self, ids: Seq[int], until: int | None = None) -> None:
        """Count the branches of a text, or those that start before `until`."""
        with self._lock:
            self.trie.insert(ids, until)

    def find(self, tail: Int32s, limit: int, depth: int) -> tuple[Int32s, Int32s]:
        """Continuations after the longest suffixes of `tail` and the lengths of their matches."""
        with self._lock:
            return self.index.find(tail, limit, depth)

    def branches(
        self, suffix: Int32s, own: CountedTrie, own_weight: float, weight: float, most: int, deepest: int
    ) -> tuple[Int32s, Int32s, Int32s, Floats]:
        """The most frequent nodes after `suffix` in this store and in a request's own trie, counts weighted."""
        with self._lock:
            trie = self.trie if weight else EMPTY
            other = own if own_weight else EMPTY
            found: tuple[Int32s, Int32s, Int32s, Floats] = best_branches(
                trie.nodes, trie.table, trie.find(suffix), np.float32(weight),
                other.nodes, other.table, other.find(suffix), np.float32(own_weight),
                most, deepest,
            )  # fmt: skip
            return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the store to a file, whole or not at all."""
        write_store(self, Path(path), fingerprint(self.tokenizer))

    def contents(self) -> dict[str, Int32s]:
        """What a file holds: the texts, and the trie's nodes."""
        with self._lock:
            tokens, parents, counts = self.trie.counted()
            return {"text": self.index.text.copy(), "tokens": tokens, "parents": parents, "counts": counts}

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add what a file holds to this store."""
        header, arrays = read_file(Path(path))
        if header["vocab_size"] != self.vocab_size:
            raise StoreError(
                f"{path} was made for a vocabulary of {header['vocab_size']} tokens and this model has "
                f"{self.vocab_size}: build it again with this model's tokenizer."
            )
        ours = fingerprint(self.tokenizer)
        if ours and header["tokenizer"] and header["tokenizer"] != ours:
            raise StoreError(f"{path} was made with another tokenizer: build it again with this model's.")
        self.merge(arrays)

    def merge(self, arrays: dict[str, Int32s]) -> None:
        """Add the contents of a file."""
        with self._lock:
            self.index.extend(arrays["text"])
            self.trie.merge(arrays["tokens"], arrays["parents"], arrays["counts"])


def fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The same for tokenizers with the same ids for the same tokens; empty where there is none."""
    if tokenizer is None:
        return ""
    digest = hashlib.sha256()
    for token, place in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{place} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def write_store(store: Store, path: Path, tokenizer: str) -> None:
    """Magic, length of the header, header (JSON), int32 arrays, SHA-256 of all that. Replaces the file in one move."""
    arrays = store.contents()
    header = {
        "version": VERSION,
        "vocab_size": store.vocab_size,
        "tokenizer": tokenizer,
        "arrays": {name: len(array) for name, array in arrays.items()},
    }
    text = json.dumps(header).encode()
    data = [array.astype("<i4").tobytes() for array in arrays.values()]
    parts = [MAGIC, len(text).to_bytes(4, "little"), text, *data]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    try:
        replace_file(path, [*parts, digest.digest()])
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Int32s]]:
    """The header and the arrays of a store's file, checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    start = len(MAGIC) + 4
    if not data.startswith(MAGIC):
        raise StoreError(f"{path} is not a lookfar store: make one with lookfar store build.")
    size = int.from_bytes(data[len(MAGIC) : start], "little")
    try:
        header = json.loads(data[start : start + size])
        version, lengths = header["version"], {str(k): int(n) for k, n in header.get("arrays", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StoreError(f"{path} is damaged: build it again.") from None
    if version != VERSION:
        raise StoreError(f"{path} has version {version} of the format and this lookfar reads {VERSION}: upgrade it.")
    end = start + size + 4 * sum(lengths.values())
    if len(data) != end + 32 or hashlib.sha256(data[:end]).digest() != data[end:]:
        raise StoreError(f"{path} is cut short or damaged: build it again.")
    arrays, at = {}, start + size
    for name, length in lengths.items():
        arrays[name] = np.frombuffer(data, "<i4", length, at).astype(np.int32)
        at += 4 * length
    if not _plausible(header.get("vocab_size"), arrays):
        raise StoreError(f"{path} is damaged: build it again.")
    return header, arrays


def _plausible(vocab_size: Any, arrays: dict[str, Int32s]) -> bool:
    """Compiled code trusts these arrays, so what points outside of them is found here."""
    if not isinstance(vocab_size, int) or set(arrays) != {"text", "tokens", "parents", "counts"}:
        return False
    text, tokens, parents, counts = (arrays[name] for name in ("text", "tokens", "parents", "counts"))
    return (
        len(tokens) == len(parents) == len(counts)
        and bool(((text >= END) & (text < vocab_size)).all())
        and bool(((tokens >= 0) & (tokens < vocab_size) & (counts > 0)).all())
        and bool(((parents >= 0) & (parents <= np.arange(len(parents)))).all())
    )
