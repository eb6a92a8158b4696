"""Draft states of tenants, and the files that they are kept in."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from threading import Thread

from filelock import FileLock, Timeout

from lookfar.errors import StoreError
from lookfar.lm import LM
from lookfar.sharing.share import Share
from lookfar.speculation.draft_state import DraftState

log = logging.getLogger("lookfar.server")


class Namespaces:
    """One draft state for each namespace: the LM's own for "", and others as they are needed.

    With a file `answers.store`, namespace "a" is kept in `answers.a.store`. Files are replaced in one move, so a
    process that is killed while it saves leaves the last complete file. With a `share`, the store of each namespace is
    that of all replicas.
    """

    def __init__(self, lm: LM, file: Path | None = None, share: Share | None = None) -> None:
        self._lm = lm
        self._file = file
        self._share = share
        self._states: dict[str, DraftState] = {}
        self._saved: dict[str, int] = {}  # size of each store when it was last saved
        if file is not None and not file.absolute().parent.is_dir():
            raise StoreError(f"{file.parent} is not a directory: give --store a file in one that exists.")
        if file is not None and file.is_dir():
            raise StoreError(f"{file} is a directory: give --store a file in it, such as {file / 'answers.store'}.")
        self._lock = _locked(file) if file is not None and lm.remember else None
        self.draft_state("")

    def draft_state(self, namespace: str) -> DraftState:
        """Return the draft state of a namespace, with the contents of its file."""
        if namespace not in self._states:
            lm = self._lm
            state = lm.draft_state if not namespace else lm.new_draft_state(lm.draft_state.sources.vocab_size)
            path = self.path(namespace)
            if path is not None and path.exists():
                state.store.load(path)
            self._states[namespace] = state
            self._saved[namespace] = _size(state)
            if self._share is not None and not namespace:
                self._share.attach(state.store)  # a wrong password ends the start of the server
            elif self._share is not None:
                Thread(target=self._attach, args=(self._share, namespace), daemon=True).start()
        return self._states[namespace]

    def _attach(self, share: Share, namespace: str) -> None:
        """Share the store of a tenant; the request that needs it first does not wait for the server."""
        try:
            share.attach(self._states[namespace].store, namespace)
        except StoreError as error:
            log.error("A draft store is not shared.", extra={"fields": {"namespace": namespace, "error": str(error)}})

    def path(self, namespace: str) -> Path | None:
        if self._file is None or not namespace:
            return self._file
        return self._file.with_name(f"{self._file.stem}.{namespace}{self._file.suffix}")

    @property
    def tokens(self) -> dict[str, int]:
        """The tokens in the store of each namespace."""
        return {name: state.store.index.size for name, state in self._states.items()}

    def save(self) -> None:
        """Write the stores that have grown. A failure is logged, and tried again the next time."""
        for namespace, state in list(self._states.items()):
            path, now = self.path(namespace), _size(state)
            if path is None or now == self._saved[namespace]:
                continue
            try:
                state.store.save(path)
                self._saved[namespace] = now
            except (OSError, StoreError) as error:
                log.error("The draft store cannot be saved.", extra={"fields": {"error": str(error)}})

    def close(self) -> None:
        """Save the stores, and let other servers use their files."""
        self.save()
        if self._lock is not None:
            self._lock.release()


def _locked(file: Path) -> FileLock:
    """Return the lock of the only server that saves to a file: of two, the last one to save would win."""
    if not os.access(file.absolute().parent, os.W_OK):
        raise StoreError(f"{file.parent} cannot be written to: give --store a file elsewhere, or use --no-remember.")
    lock = FileLock(f"{file}.lock", timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise StoreError(f"Another server uses {file}: give each its own --store, and --share to share them.") from None
    return lock


def _size(state: DraftState) -> int:
    """Return a number that changes whenever a text is stored."""
    return state.store.index.size
