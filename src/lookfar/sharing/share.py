"""Sharing of draft stores: a thread that publishes what stores learn and teaches them what other replicas learned.

Decoding never waits for it. A store hands over a finished text by appending it to a bounded queue; when the server is
away for so long that the queue is full, the oldest texts are not published.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic, sleep
from weakref import WeakSet, finalize, ref

from lookfar.core.locks import fork_safe_lock
from lookfar.errors import ConfigError, StoreError
from lookfar.retrieval.draft_store import DraftStore
from lookfar.sharing.record import MAX_TOKENS, Record, decode, encode
from lookfar.sharing.server import COUNT, SharedNamespace, ShareServer

log = logging.getLogger("lookfar.sharing")
DELAY_MS = 50
MAX_ENTRIES = 1 << 14  # of a stream; the server drops the oldest beyond that
MAX_WAITING = 1 << 10  # records that wait to be published
FIRST_RETRY, LAST_RETRY = 0.1, 5.0  # seconds between two attempts to reach the server
CLOSE_SECONDS = 1.0  # to publish the last texts when the program ends
_shares: WeakSet[Share] = WeakSet()


@dataclass
class ShareCounts:
    """Counts of records since the start."""

    published: int = 0
    received: int = 0  # and learned
    repeated: int = 0  # known already, and not learned again
    refused: int = 0  # of another tokenizer, another version, or damaged
    dropped: int = 0  # never published: too many were waiting


class Share:
    """Shares draft stores through one server, each in a namespace of its own.

    `url` is redis://, rediss:// (TLS) or unix://. Texts are published at once, and what others published is read every
    `delay_ms` milliseconds. A stream holds about `max_entries` texts.
    """

    def __init__(self, url: str, *, delay_ms: int = DELAY_MS, max_entries: int = MAX_ENTRIES) -> None:
        for name, value in (("delay_ms", delay_ms), ("max_entries", max_entries)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
        self.counts = ShareCounts()
        self.error = ""  # a sentence, while the server cannot be used
        self.is_closed = False
        self._delay = delay_ms / 1000
        self._lock = fork_safe_lock()
        self._server = ShareServer(url, max_entries)
        self._namespaces: tuple[SharedNamespace, ...] = ()
        self._reasons: set[str] = set()  # for refusing records, already logged
        self._start()
        _shares.add(self)

    def _start(self) -> None:
        """Begin with nothing to publish; the thread starts with the first store, and again in a forked process."""
        self._process = os.getpid()
        self._waiting: deque[tuple[SharedNamespace, Record]] = deque(maxlen=MAX_WAITING)
        self._sending: list[tuple[SharedNamespace, Record]] = []  # the server may have some of them
        self._retry = 0.0  # seconds until the next attempt; 0 while the server answers
        self._rounds = 0
        self._has_more = False
        self._wake = Event()
        self._thread: Thread | None = None

    def attach(self, store: DraftStore, namespace: str = "") -> None:
        """Share a store. Raises StoreError if the server refuses the login or has texts of another tokenizer.

        A server that cannot be reached is no error: it is tried again in the background.
        """
        shared = SharedNamespace(namespace, store, self._enqueue)
        with self._lock:
            if store.sharing is not None or any(namespace == other.name for other in self._namespaces):
                raise StoreError(f"The store or the namespace {namespace!r} is shared already: one store for each.")
            self._check_now(shared)
            self._namespaces += (shared,)
            store.sharing = shared
            self._run()

    def flush(self, seconds: float = 10.0) -> bool:
        """Wait until everything is published and read; returns whether that was done in time."""
        deadline, rounds = monotonic() + seconds, self._rounds + 2  # one may be under way
        while self._waiting or self._sending or self._has_more or self._rounds < rounds:
            if monotonic() > deadline or self.is_closed:
                return False
            if not self._retry:
                self._wake.set()
            sleep(0.001)
        return True

    def close(self) -> None:
        """Publish what is waiting, if the server answers, and stop sharing."""
        if self.is_closed:
            return
        if self._thread is not None and self._process == os.getpid() and not self._retry:
            self.flush(CLOSE_SECONDS)
        self.is_closed = True
        for shared in self._namespaces:
            shared.store.sharing = None
        self._wake.set()
        if self._process == os.getpid():
            if self._thread is not None:
                self._thread.join(CLOSE_SECONDS)
            self._server.disconnect()

    def _check_now(self, shared: SharedNamespace) -> None:
        from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

        try:
            self._server.check(shared)
        except (AuthenticationError, NoPermissionError) as error:
            raise StoreError(self._server.explain(error)) from None
        except (RedisError, OSError) as error:
            self._note(error)

    def _run(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            wake = self._wake
            self._thread = Thread(target=_keep_exchanging, args=(ref(self), wake), name="lookfar-share", daemon=True)
            self._thread.start()
            finalize(self, wake.set).atexit = False

    def _enqueue(self, shared: SharedNamespace, use: int, ids: Seq[int]) -> None:
        """Queue a text that a store learned. Called in the decoding thread, with the store locked."""
        provenance = shared.store.provenance
        if self._process != os.getpid():
            self._start()
            for each in self._namespaces:
                each.store.provenance.renew()  # the parent process goes on under the old name
            self._run()
        for start in range(0, len(ids), MAX_TOKENS):
            self.counts.dropped += len(self._waiting) == MAX_WAITING
            record = Record(provenance.origin, provenance.next_number(), use, ids[start : start + MAX_TOKENS])
            self._waiting.append((shared, record))
        if not self._retry:
            self._wake.set()

    def exchange(self) -> float:
        """Publish and read once; returns the seconds until the next time. Called by the thread."""
        try:
            self._exchange(self._checked())
        except Exception as error:  # whatever happens here, decoding goes on
            self._note(error)
            return self._retry
        if self._retry:
            log.info("The shared store at %s is back.", self._server.address)
            self.error, self._retry = "", 0.0
        self._rounds += 1
        return 0.0 if self._has_more or self._waiting else self._delay

    def _checked(self) -> list[SharedNamespace]:
        """Return the namespaces that can be used, which is checked once for each connection."""
        for shared in self._namespaces:
            if not shared.is_checked:
                try:
                    self._server.check(shared)
                except StoreError as error:
                    log.warning(str(error))
        return [shared for shared in self._namespaces if not shared.is_refused]

    def _exchange(self, namespaces: Seq[SharedNamespace]) -> None:
        while self._waiting and len(self._sending) < COUNT:
            self._sending.append(self._waiting.popleft())
        outgoing = [
            (shared.texts_key, encode(record, shared.tokenizer))
            for shared, record in self._sending
            if not shared.is_refused
        ]
        found = self._server.exchange(outgoing, namespaces) if namespaces else []
        self.counts.published += len(outgoing)
        self._sending = []
        for shared, entries in found:
            self._learn(shared, entries)
        self._has_more = any(len(entries) == COUNT for _, entries in found)

    def _learn(self, shared: SharedNamespace, entries: Seq[tuple[bytes, bytes]]) -> None:
        """Teach a store what other replicas published."""
        store, counts = shared.store, self.counts
        for entry, data in entries:
            shared.position = entry
            try:
                record = decode(data, shared.tokenizer, store.vocab_size)
            except ValueError as error:
                counts.refused += 1
                self._refuse(str(error))
                continue
            if store.receive(record.ids, record.use, record.origin, record.number):
                counts.received += 1
            elif record.origin != store.provenance.origin:
                counts.repeated += 1

    def _refuse(self, reason: str) -> None:
        """Say once for each reason why records are refused."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.warning("Texts in the shared store at %s are refused: %s.", self._server.address, reason)

    def _note(self, error: Exception) -> None:
        """Note that the server cannot be used, and try again later: soon at first."""
        sentence = self._server.explain(error)
        if sentence != self.error and not self.is_closed:
            log.warning(sentence)
        self.error = sentence
        self._retry = min(2 * self._retry or FIRST_RETRY, LAST_RETRY) * random.uniform(0.8, 1.0)
        for shared in self._namespaces:
            shared.is_checked = False
        self._server.disconnect()


def _keep_exchanging(share_of: ref[Share], wake: Event) -> None:
    """Exchange records until the share is closed or nobody holds it any more."""
    delay = 0.0
    while True:
        wake.wait(delay)
        wake.clear()
        share = share_of()
        if share is None or share.is_closed:
            return
        delay = share.exchange()
        del share


@atexit.register
def _close_all() -> None:
    for share in list(_shares):
        share.close()
