"""The file of a draft store: a safetensors file with a checksum.

It holds past texts, and what the drafters of a process have learned beside them: recycled predictions, and the weights
of acceptance models.

Compiled code trusts the arrays of a store, so everything that a file brings in is checked here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lookfar.core.arrays import Int32s
from lookfar.core.files import replace_file
from lookfar.errors import StoreError
from lookfar.retrieval.provenance import Provenance
from lookfar.retrieval.recycle_file import TABLE_ARRAYS, FileArrays, plausible_table
from lookfar.retrieval.suffix_index import END

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "lookfar draft store"
TEXTS = ("text", "tokens", "parents", "counts")
VERSION = 3
READABLE = (2, VERSION)  # files of version 2 hold texts only
MODEL = "acceptance."  # what the names of arrays of acceptance models begin with


class StoreHeader(NamedTuple):
    """The metadata of a store file."""

    version: int
    vocab_size: int
    tokenizer: str  # a fingerprint; empty if unknown
    learned: str = ""  # which shared texts the store holds (`Provenance.dumps`)

    @property
    def made_for(self) -> tuple[int, str]:
        """The vocabulary and tokenizer. Stores that agree in both can be merged."""
        return self.vocab_size, self.tokenizer


class StoreContents(NamedTuple):
    """The arrays of a file."""

    text: Int32s  # past texts, `END` behind each
    tokens: Int32s  # of the trie's nodes, parents before children
    parents: Int32s  # 0 stands before every branch; node i of the arrays is i + 1 here
    counts: Int32s
    beside: FileArrays = MappingProxyType({})  # what drafters have learned beside texts, by name

    @property
    def texts(self) -> dict[str, Int32s]:
        """The arrays about texts, by name."""
        return {"text": self.text, "tokens": self.tokens, "parents": self.parents, "counts": self.counts}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a digest that is equal for tokenizers with the same ids for the same tokens; empty without one."""
    if tokenizer is None:
        return ""
    digest = hashlib.sha256()
    for token, place in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{place} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def write_store_file(path: Path, header: StoreHeader, contents: StoreContents) -> None:
    """Write a store file, replacing an older one in one move."""
    metadata = {name: str(value) for name, value in header._asdict().items()}
    metadata |= {"format": FORMAT, "sha256": _checksum(header, contents)}
    try:
        arrays = {name: np.ascontiguousarray(array) for name, array in {**contents.texts, **contents.beside}.items()}
        replace_file(path, [save(arrays, metadata)])
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error


def read_store_file(path: Path) -> tuple[StoreHeader, StoreContents]:
    """Read and check a store file."""
    damaged = StoreError(f"{path} is cut short or damaged: build it again.")
    if path.is_dir():
        raise StoreError(f"{path} is a directory: give the file of a store.")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise StoreError(f"{path} is not a lookfar store: make one with `lookfar store build`.")
            if metadata.get("version") not in [str(version) for version in READABLE]:
                raise StoreError(
                    f"{path} has version {metadata.get('version')} of the format and this lookfar reads "
                    f"{READABLE[0]} to {VERSION}: build it again, or upgrade lookfar."
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text, tokens, parents, counts = (arrays.pop(name) for name in TEXTS)
            contents = StoreContents(text, tokens, parents, counts, arrays)
            learned = metadata.get("learned", "")  # files of earlier versions lack it
            version = int(metadata["version"])
            header = StoreHeader(version, int(metadata["vocab_size"]), metadata["tokenizer"], learned)
            Provenance().loads(learned)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
    except SafetensorError:
        raise StoreError(f"{path} is not a lookfar store, or it is cut short or damaged: build it again.") from None
    except (KeyError, ValueError, TypeError, AttributeError):  # the last two: numbers that NumPy does not have
        raise damaged from None
    if metadata.get("sha256") != _checksum(header, contents) or not _plausible(header.vocab_size, contents):
        raise damaged
    return header, contents


def _checksum(header: StoreHeader, contents: StoreContents) -> str:
    digest = hashlib.sha256(repr(tuple(header[:3])).encode() + header.learned.encode())
    for array in contents.texts.values():
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    for name, array in sorted(contents.beside.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _plausible(vocab_size: int, contents: StoreContents) -> bool:
    """Whether texts are one-dimensional int32 arrays in which nothing points outside of them, and the rest is sound."""
    if any(array.ndim != 1 or array.dtype != np.int32 for array in contents.texts.values()):
        return False
    tables = {name: array for name, array in contents.beside.items() if not name.startswith(MODEL)}
    if tables and not (plausible_table(tables, vocab_size) and len(tables) == TABLE_ARRAYS):
        return False
    text, tokens, parents, counts, _ = contents
    return (
        len(tokens) == len(parents) == len(counts)
        and bool(((text >= END) & (text < vocab_size)).all())
        and bool(((tokens >= 0) & (tokens < vocab_size) & (counts > 0)).all())
        and bool(((parents >= 0) & (parents <= np.arange(len(parents)))).all())
    )
