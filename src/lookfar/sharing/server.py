"""The Redis or Valkey server of a shared store: one stream of records for each namespace."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lookfar.errors import StoreError, first_sentence
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.store_file import tokenizer_fingerprint

if TYPE_CHECKING:
    from redis import Redis

FIELD = b"r"  # of a stream's entries; it holds the record
START = b"0-0"
TIMEOUT_SECONDS = 2.0  # of connecting and of every reply
COUNT = 256  # entries that are read at once
NAMESPACE = re.compile(r"[\w.@-]{0,64}", re.ASCII)


@dataclass
class SharedNamespace:
    """A store, and how far its stream is read."""

    name: str
    store: DraftStore
    enqueue: Callable[[SharedNamespace, int, Seq[int]], None]  # called by `publish`
    position: bytes = START  # the last entry that was read
    is_checked: bool = False  # since the connection was made
    is_refused: bool = False  # because it is used with another tokenizer

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.name):
            raise StoreError(
                f"A namespace has at most 64 letters, digits or any of . _ @ - and {self.name!r} has others."
            )
        suffix = f":{self.name}" if self.name else ""
        self.texts_key, self.tokenizer_key = f"lookfar:texts{suffix}".encode(), f"lookfar:tokenizer{suffix}".encode()
        tokenizer = tokenizer_fingerprint(self.store.tokenizer) or f"{self.store.vocab_size} tokens"
        self.tokenizer = hashlib.sha256(tokenizer.encode()).digest()[:8]

    def publish(self, use: int, ids: Seq[int]) -> None:
        self.enqueue(self, use, ids)

    def move_to(self, store: DraftStore) -> None:
        self.store.sharing, self.store, store.sharing = None, store, self


class ShareServer:
    """A connection that is made when it is needed."""

    def __init__(self, url: str, max_entries: int) -> None:
        self.address = without_login(url)  # for messages
        self.max_entries = max_entries
        self._client = connect(url, self.address)

    def check(self, namespace: SharedNamespace) -> None:
        """Check that a namespace is used with this tokenizer, and whether the server has lost its stream.

        The ids of entries grow with time. If the newest one is older than the last that was read, the server was
        restarted without its data.
        """
        client = self._client
        namespace.is_checked = namespace.is_refused = False
        client.set(namespace.tokenizer_key, namespace.tokenizer, nx=True)
        if client.get(namespace.tokenizer_key) != namespace.tokenizer:
            namespace.is_checked = namespace.is_refused = True
            raise StoreError(
                f"The namespace {namespace.name!r} of the shared store at {self.address} is used with another "
                "tokenizer: choose another namespace for this model."
            )
        known: Any = client.exists(namespace.texts_key)
        last: Any = client.xinfo_stream(namespace.texts_key)["last-generated-id"] if known else START
        if order_of(last) < order_of(namespace.position):
            namespace.position = START
        namespace.is_checked = True

    def exchange(
        self, outgoing: Seq[tuple[bytes, bytes]], namespaces: Seq[SharedNamespace]
    ) -> list[tuple[SharedNamespace, list[tuple[bytes, bytes]]]]:
        """Append records to streams, and read what is new: ids of entries and their records, for each namespace."""
        pipeline = self._client.pipeline(transaction=False)
        for key, record in outgoing:
            pipeline.xadd(key, {FIELD: record}, maxlen=self.max_entries, approximate=True)
        by_key = {namespace.texts_key: namespace for namespace in namespaces}
        pipeline.xread({key: namespace.position for key, namespace in by_key.items()}, count=COUNT)
        answers: Any = pipeline.execute()
        return [
            (by_key[key], [(entry, fields.get(FIELD, b"")) for entry, fields in entries])
            for key, entries in answers[-1] or ()
        ]

    def explain(self, error: Exception) -> str:
        """Return a sentence about an error of the connection."""
        from redis.exceptions import AuthenticationError, NoPermissionError

        where = f"The shared store at {self.address}"
        if isinstance(error, AuthenticationError):
            return f"{where} refuses the login: check the user and password in its URL."
        if isinstance(error, NoPermissionError):
            return f"{where} does not let this user read and write streams whose names start with lookfar."
        reason = first_sentence(Exception(re.sub(r"^Error -?\d+ connecting to \S+\. ", "", str(error))))
        return f"{where} cannot be used ({reason}): decoding goes on without it, and it is tried again."

    def disconnect(self) -> None:
        self._client.connection_pool.disconnect()


def connect(url: str, address: str) -> Redis:
    """Return a client, which connects on first use."""
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise StoreError("A shared store needs the Redis client: pip install 'lookfar[redis]'.") from None
    try:
        client = Redis.from_url(
            url.replace("valkey", "redis", 1) if url.startswith(("valkey://", "valkeys://")) else url,
            protocol=2,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        client.connection_pool.make_connection()  # options in the URL are checked here; nothing is sent yet
    except (ValueError, TypeError, AttributeError):
        raise StoreError(
            f"The URL of a shared store looks like redis://user:password@host:6379, or rediss:// for TLS: {address} "
            "cannot be used."
        ) from None
    return client


def without_login(url: str) -> str:
    """Return the part of a URL that may be shown: no user, no password, no options."""
    try:
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2] or parts.path
        return f"{parts.scheme}://{place}" if parts.scheme else "the one given"
    except ValueError:
        return "the one given"


def order_of(entry: bytes) -> tuple[int, ...]:
    """Return the two numbers of an entry's id."""
    return tuple(map(int, entry.split(b"-")))
