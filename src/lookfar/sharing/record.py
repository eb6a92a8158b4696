"""The records of a stream: token ids and where they come from, in a few bytes.

A record is a header and the ids as little-endian integers of two bytes, or four where an id needs them. Records come
from other machines, so everything in them is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from lookfar.core.arrays import Int32s

VERSION = 1
HEADER = struct.Struct("<BBB8s8sQ")  # version, use, bytes of an id, tokenizer, origin, number
MAX_TOKENS = 1 << 14  # of one record; longer texts are split


class Record(NamedTuple):
    """A text, or a part of one, that a store learned."""

    origin: str  # 16 hexadecimal digits, one for each store
    number: int  # counts the records of an origin
    use: int  # what the text is for (`Use`)
    ids: Seq[int] | Int32s


def encode(record: Record, tokenizer: bytes) -> bytes:
    """Return a record as bytes. `tokenizer` are eight bytes that are the same for all replicas with one tokenizer."""
    ids = np.asarray(record.ids)
    width = 2 if len(ids) and int(ids.max()) < 1 << 16 else 4
    header = HEADER.pack(VERSION, record.use, width, tokenizer, bytes.fromhex(record.origin), record.number)
    return header + ids.astype(f"<u{width}").tobytes()


def decode(data: bytes, tokenizer: bytes, vocab_size: int) -> Record:
    """Read and check a record. Raises ValueError with the reason if it cannot be used."""
    if len(data) < HEADER.size or data[0] != VERSION:
        raise ValueError("they were written by another version of lookfar, or by another program")
    _, use, width, made_with, origin, number = HEADER.unpack_from(data)
    if made_with != tokenizer:
        raise ValueError("they were made with another tokenizer")
    if width not in (2, 4) or (len(data) - HEADER.size) % width:
        raise ValueError("they are damaged")
    ids = np.frombuffer(data, f"<u{width}", offset=HEADER.size)
    if not 0 < len(ids) <= MAX_TOKENS or int(ids.max()) >= vocab_size:
        raise ValueError("they hold token ids outside the vocabulary, or too many")
    return Record(origin.hex(), number, use, ids.astype(np.int32))
