"""A runner that remembers the result of every row, so that a row is computed once for all variants of a speculator.

What a model predicts after a row depends on the row's text alone: prompt, output, and the path in the draft tree. So
results are kept by a hash of that text. A step whose rows are all known runs no model; otherwise the missing rows are
computed, together with the nodes before them and what the KV cache lacks of the text. One request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba import njit

from lookfar.core.arrays import Floats, Int32s, Ints
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kvcache.slots import SlotKVCache
from lookfar.retrieval.recycle_table import SAMPLED_TOP_K
from lookfar.runners.base import ModelRunner, StepResult
from lookfar.sampling.sampler import choose_rows

ROOM = 4096  # positions of the KV cache
SEED = np.uint64(0x9E3779B97F4A7C15)


@njit
def extend_hash(mixed, token):  # type: ignore[no-untyped-def]
    mixed = (mixed ^ np.uint64(token + 1)) * np.uint64(0xC2B2AE3D27D4EB4F)
    return mixed ^ (mixed >> np.uint64(29))


@njit
def hash_text(tokens):  # type: ignore[no-untyped-def]
    mixed = SEED
    for token in tokens:
        mixed = extend_hash(mixed, token)
    return mixed


@njit
def hash_rows(before, pending, tokens, parents):  # type: ignore[no-untyped-def]
    """Hash the texts of pending tokens and of the nodes of a tree; `before` is the hash of what precedes them."""
    hashes = np.empty(len(pending) + len(tokens), np.uint64)
    for row in range(len(pending)):
        before = extend_hash(before, pending[row])
        hashes[row] = before
    for node in range(len(tokens)):
        hashes[len(pending) + node] = extend_hash(hashes[len(pending) + parents[node]], tokens[node])
    return hashes


class RowMemo:
    """Predictions by the hash of a text, and tokens that were sampled there."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.places: dict[int, int] = {}
        self.sampled: dict[int, int] = {}
        self.top_ids: Int32s = np.empty((1 << 12, SAMPLED_TOP_K), np.int32)
        self.top_logits: Floats = np.empty((1 << 12, SAMPLED_TOP_K), np.float32)
        self.saved = 0
        if path is not None and path.exists():
            kept = np.load(path)
            self.places = {int(key): place for place, key in enumerate(kept["keys"])}
            self.top_ids, self.top_logits = kept["top_ids"], kept["top_logits"]
            self.sampled = dict(zip(kept["sampled_keys"].tolist(), kept["sampled"].tolist(), strict=True))
            self.saved = len(self.places) + len(self.sampled)

    def add(self, keys: Seq[int], top_ids: Int32s, top_logits: Floats) -> None:
        size = len(self.places)
        while size + len(keys) > len(self.top_ids):
            self.top_ids = np.concatenate([self.top_ids, np.empty_like(self.top_ids)])
            self.top_logits = np.concatenate([self.top_logits, np.empty_like(self.top_logits)])
        for key, ids, logits in zip(keys, top_ids, top_logits, strict=True):
            place = self.places.setdefault(key, len(self.places))
            self.top_ids[place], self.top_logits[place] = ids, logits

    def save(self) -> None:
        """Write the memo to its file, if it has grown."""
        count = len(self.places)
        if self.path is None or count + len(self.sampled) == self.saved:
            return
        keys = np.fromiter(self.places, np.uint64, count)
        part = self.path.with_suffix(".part.npz")
        arrays = {"keys": keys, "top_ids": self.top_ids[:count], "top_logits": self.top_logits[:count]}
        arrays["sampled_keys"] = np.fromiter(self.sampled, np.uint64, len(self.sampled))
        arrays["sampled"] = np.fromiter(self.sampled.values(), np.int64, len(self.sampled))
        np.savez(part, **arrays)
        part.replace(self.path)
        self.saved = count + len(self.sampled)


class MemoRunner:
    """Answers steps from a memo, and the rest with another runner. `text` returns the text of the running request."""

    name = "memo"

    def __init__(self, inner: ModelRunner, memo: RowMemo, text: Callable[[], list[int]]) -> None:
        self.inner, self.memo, self.text = inner, memo, text
        self.model = inner.model
        self.computed = self.asked = 0  # rows
        self.salt = 0  # tells requests with different sampling noise apart
        self._tokens: list[int] = []  # the text of the request
        self._cache = inner.create_cache()
        self._cache.reserve(1, ROOM, most=1, keep=False)
        self._cached: list[int] = []  # the text in the KV cache of the inner runner
        self._handle, _ = self._cache.allocate()

    @property
    def limits(self) -> Any:
        return self.inner.limits

    def create_cache(self) -> SlotKVCache:
        return SlotKVCache()

    def refresh(self, everything: bool = False) -> Any:
        return self.inner.refresh(everything)

    def missing(self, *_: Any) -> list[Any]:
        return []

    def next_wanted(self) -> None:
        return None

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> Any:
        started = perf_counter()
        (rows,) = plan.requests
        pending = len(rows.pending)
        self._tokens = self.text()[: rows.num_cached + pending]
        before = hash_text(np.array(self._tokens[: rows.num_cached], np.int64))
        hashes = hash_rows(np.uint64(before), rows.pending, rows.tree.tokens, rows.tree.parents).tolist()
        needed = np.flatnonzero(rows.needs_logits).tolist()
        missing = [row for row in needed if hashes[row] not in self.memo.places]
        if rows.sampler is not None and rows.complete:
            known = self.memo.sampled
            missing = [r for r in needed if r in missing or (r >= pending - 1 and hashes[r] ^ self.salt not in known)]
        self.asked += len(needed)
        if missing:
            self._compute(rows, hashes, missing)
        found = self._result(rows, hashes, needed, max(plan.top_k, 1))
        found.seconds = perf_counter() - started
        found.num_rows = len(rows)
        return SimpleNamespace(result=lambda: found)

    def _result(self, rows: RequestPlan, keys: list[int], needed: list[int], k: int) -> StepResult:
        places = [self.memo.places[keys[row]] for row in needed]
        ids: Int32s = np.full((len(rows), k), -1, np.int32)
        logits: Floats = np.full((len(rows), k), -1, np.float32)
        ids[needed], logits[needed] = self.memo.top_ids[places, :k], self.memo.top_logits[places, :k]
        found = StepResult(np.zeros(1, np.int64), ids[:, 0].astype(np.int64), no_logits, ids, logits)
        if rows.sampler is not None and rows.complete:
            found.sampled = np.array([self.memo.sampled.get(key ^ self.salt, -1) for key in keys], np.int64)
        return found

    def _compute(self, rows: RequestPlan, keys: list[int], missing: list[int]) -> None:
        """Compute missing rows, and those of the nodes before them."""
        text, pending = self._tokens, len(rows.pending)
        common = 0
        while common < min(len(self._cached), len(text) - 1) and self._cached[common] == text[common]:
            common += 1
        first_row = len(text) - pending  # the position of row 0
        common = min(common, first_row + min(missing[0], pending - 1))
        self._cache.free(self._handle, self._cached)
        self._handle, cached = self._cache.allocate([*text[:common], -1]) if common else self._cache.allocate()
        wanted = {row - pending for row in missing if row >= pending}
        for node in sorted(wanted, reverse=True):
            while (node := int(rows.tree.parents[node])) >= 0:
                wanted.add(node)
        nodes = sorted(wanted)
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        columns = rows.tree.columns[:, nodes].copy()
        columns[1] = [place[int(parent)] for parent in columns[1]]
        new = np.array(text[cached:], np.int64)
        predict = len(text) - first_row - missing[0] if missing[0] < pending else 1
        tree = DraftTree(columns, rows.tree.scores[nodes], rows.tree.names)
        plan = RequestPlan(new, cached, self._handle, predict=predict, tree=tree, sampler=rows.sampler)
        result = self.inner.launch(StepPlan([plan], SAMPLED_TOP_K), self._cache).result()
        self._cache.commit(self._handle, len(new))
        self._cached = list(text)
        at = [row + len(new) - pending if row < pending else len(new) + place[row - pending] for row in missing]
        self.computed += len(new) + len(nodes)
        assert result.top_ids is not None
        assert result.top_logits is not None
        self.memo.add([keys[row] for row in missing], result.top_ids[at], result.top_logits[at])
        if rows.sampler is not None and rows.complete:
            own = np.arange(len(new) - 1, len(new) + len(nodes))
            if result.sampled is None:
                logits, sampler = result.logits(0, own), rows.sampler
                noise = sampler.noise_of(tree.depths, logits.shape[-1])  # type: ignore[attr-defined]
                sampled = choose_rows(sampler.processors, logits, noise)
            else:
                sampled = result.sampled[own]
            of_rows = [pending - 1, *(pending + node for node in nodes)]
            self.memo.sampled |= {keys[r] ^ self.salt: int(t) for r, t in zip(of_rows, sampled, strict=True)}


def no_logits(request: int, rows: Ints) -> torch.Tensor:
    raise NotImplementedError("A memo holds no logits.")
