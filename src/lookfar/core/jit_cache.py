"""Compiled functions on disk: one checked file for each function and signature.

numba's own cache keeps an index of its files beside them. Two processes that fill it at once can leave an index that
names another signature's code, and neither file is checked, so a damaged one ends the process. Here, whatever cannot be
read, or is not what was written, is compiled again.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

from lookfar.core.files import replace_file

DIGEST = hashlib.sha256().digest_size


class CompiledFunction(FunctionCache):
    """The compiled code of one function, kept for the next process."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature, or None."""
        target_context.refresh()
        try:
            stored = self._path(sig, target_context.codegen()).read_bytes()
            digest, code = stored[:DIGEST], stored[DIGEST:]
            if hashlib.sha256(code).digest() == digest:
                return self._impl.rebuild(target_context, pickle.loads(code))
        except Exception:  # whatever is wrong with the file, compiling works
            return None
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for a signature, if there is room for it."""
        if not self._impl.check_cachable(data):
            return
        code = dumps(self._impl.reduce(data))
        try:
            self._impl.locator.ensure_cache_path()
            replace_file(self._path(sig, data.codegen), [hashlib.sha256(code).digest(), code])
        except OSError:
            return

    def _path(self, sig: Any, codegen: Any) -> Path:
        key = (numba.__version__, self._index_key(sig, codegen))
        return (
            Path(self.cache_path) / f"{self._impl.filename_base}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        )
