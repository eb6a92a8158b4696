"""The host's time between two forward passes, and the costs of the draft store: no model needed.

    python benchmarks/host_cost.py

An artificial language (every token has eight usual successors) takes the place of a model. Measured are the host's time
of a step (`Stats.host_seconds`: drafting, planning, verifying, learning), a look-up in stores of growing size, and the
store's memory. Prints tables and one JSON line. Bounded by cache misses in the tables and by NumPy calls.
"""

from __future__ import annotations

import json
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lookfar.core.plan import RunnerLimits, StepPlan
from lookfar.drafters.registry import auto_strategies
from lookfar.drafters.trie import Trie, TrieDrafter
from lookfar.engine.engine import Engine, EngineConfig
from lookfar.engine.request import Request
from lookfar.engine.stats import add_up
from lookfar.kernels.row_table import MAX_PATH
from lookfar.kvcache.slots import SlotKVCache
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.suffix_index import MAX_MATCH
from lookfar.runners.base import StepResult
from lookfar.speculation.draft_state import DraftState

VOCAB, CONTEXT, STORED = 49152, 2000, 1_000_000
USUAL = np.random.default_rng(0).integers(0, VOCAB, (VOCAB, 8))


def artificial_text(length: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.geometric(0.6, length) - 1, 7)
    text = np.empty(length, np.int64)
    text[0] = rng.integers(VOCAB)
    for i in range(1, length):
        text[i] = USUAL[text[i - 1], ranks[i]]
    return text


class ArtificialRunner:
    """Predicts the usual successors, in a slightly different order each time.

    Its results are the eight most likely tokens of each row and no logits, as from a GPU: choosing among logits is the
    device's work, and computing them here would sweep the host's caches.
    """

    name, limits = "artificial", RunnerLimits(512, MAX_PATH, padded=False, captured=True)
    support = SimpleNamespace(max_positions=None, trees=True, tree_limit=None)
    model: Any = SimpleNamespace(vocab_size=VOCAB, support=support)

    def create_cache(self) -> SlotKVCache:
        return SlotKVCache()

    def refresh(self, everything: bool = False) -> None:
        pass

    def launch(self, plan: StepPlan, cache: SlotKVCache) -> Any:
        started = perf_counter()
        ids, values = self.top_after(np.concatenate([rows.tokens for rows in plan.requests]))
        starts = np.cumsum([0, *plan.lengths[:-1]])
        found = StepResult(starts, ids[:, 0].astype(np.int64), lambda *_: torch.empty(0), ids, values)

        def result() -> StepResult:
            found.seconds = perf_counter() - started  # what the host does meanwhile costs nothing
            return found

        return SimpleNamespace(result=result)

    def top_after(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = 10.0 - np.arange(8) + 3 * np.random.default_rng(len(tokens)).random((len(tokens), 8))
        best = np.argsort(-logits, 1)
        ids = np.take_along_axis(USUAL[tokens], best, 1).astype(np.int32)
        return ids, np.take_along_axis(logits, best, 1).astype(np.float32)


def step_cost(budget: int | None, store: DraftStore, steps: int = 200, requests: int = 1) -> dict[str, float]:
    """Microseconds of the host for a step of some requests with a row budget each; None: no speculation."""
    engine = Engine(ArtificialRunner(), EngineConfig(max_batch=requests), DraftState(VOCAB, store))
    strategies = auto_strategies() if budget is not None else ()
    for number in range(requests):
        prompt = artificial_text(CONTEXT, seed=2 + 100 * number).tolist()
        engine.add(Request(prompt, CONTEXT, strategies=strategies, budget=budget), every_step=False)
    times: list[float] = []
    before = 0.0
    while len(times) < steps + 40:
        prefills = len(engine.scheduler.running) < requests
        prefills = prefills or any(state.num_pending > 1 for state in engine.scheduler.running.values())
        for output in engine.step():
            if output.error is not None:
                raise output.error
        total = add_up(state.stats for state in engine.scheduler.running.values())
        if not prefills:
            times.append(total.host_seconds - before)
        before = total.host_seconds
    return {
        "requests": requests,
        "budget": budget or 0,
        "microseconds": 1e6 * float(np.median(times[40:])),
        "p95": 1e6 * float(np.percentile(times[40:], 95)),
        "rows": total.rows_per_step,
        "tokens_per_step": total.tokens_per_step,
    }


def look_ups(tokens: int) -> dict[str, float]:
    """Microseconds of a look-up for 64 rows after `tokens` were learned, by suffix and by trie."""
    store = DraftStore(VOCAB, max_tokens=16 << 20, max_nodes=16 << 20)
    text = artificial_text(tokens, seed=3)
    start = perf_counter()
    store.learn([text[i : i + 500] for i in range(0, tokens, 500)])
    learned = perf_counter() - start
    drafter = TrieDrafter(Trie(), store, [1], remember=False)
    queries = artificial_text(2000, seed=4)
    times: dict[str, list[float]] = {"suffix": [], "trie": []}
    for end in range(MAX_MATCH, len(queries), 7):
        ids = queries[:end].tolist()
        tail = np.array(ids[-MAX_MATCH:], np.int32)
        start = perf_counter()
        store.find(tail, 16, 24)
        times["suffix"].append(perf_counter() - start)
        start = perf_counter()
        drafter.propose(ids, 100)
        times["trie"].append(perf_counter() - start)
    record = {f"{name}_{q}": 1e6 * float(np.percentile(t, q)) for name, t in times.items() for q in (50, 99)}
    return record | {"tokens": tokens, "learn_microseconds_per_token": 1e6 * learned / tokens, "bytes": store.nbytes}


def memory() -> list[dict[str, float]]:
    """Bytes of a store with the default bounds as more text is learned."""
    store, sizes = DraftStore(VOCAB), []
    for million in range(1, 11):
        text = artificial_text(1_000_000, seed=10 + million)
        store.learn([text[i : i + 500] for i in range(0, len(text), 500)])
        sizes.append({"millions": million, "index": store.index.nbytes, "trie": store.trie.nbytes})
    return sizes


def main() -> None:
    look_ups(1000)  # compiles
    store = DraftStore(VOCAB)
    text = artificial_text(STORED, seed=1)
    store.learn([text[i : i + 500] for i in range(0, STORED, 500)])
    step_cost(16, store, 20)
    report = {
        "steps": [
            step_cost(None, store),
            step_cost(16, store),
            step_cost(64, store),
            step_cost(None, store, requests=32),
            step_cost(8, store, requests=32),
        ],
        "look_ups": [look_ups(tokens) for tokens in (1_000, 100_000, 10_000_000)],
        "memory": memory(),
    }
    out = Console(width=120)
    for title, rows in report.items():
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in row.values()))
        out.print(table)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
