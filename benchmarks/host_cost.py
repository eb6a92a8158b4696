"""What the host does between two forwards, and what the store takes: no model needed.

    python benchmarks/host_cost.py

A made-up language (every token has eight usual successors) stands for the model's answers. Measured are the time a step
spends in drafters, merge, plan and learning (`Stats.host_seconds`), a look-up in stores of growing size, and the
store's memory. Prints tables and one JSON line. What bounds it: cache misses in the tables, and NumPy's calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lookfar.answers import Answers, Room
from lookfar.cache import SlotCache
from lookfar.config import Trie, parse_strategy
from lookfar.drafters.trie import TrieDrafter
from lookfar.engine import Call, Engine
from lookfar.gpu.table import NEAR
from lookfar.index import LONGEST
from lookfar.memory import Memory
from lookfar.sequence import Request
from lookfar.stats import add_up
from lookfar.store import Store
from lookfar.tree import Plan

VOCAB, CONTEXT, STORED = 49152, 2000, 1_000_000
USUAL = np.random.default_rng(0).integers(0, VOCAB, (VOCAB, 8))


def made_up_text(length: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.geometric(0.6, length) - 1, 7)
    text = np.empty(length, np.int64)
    text[0] = rng.integers(VOCAB)
    for i in range(1, length):
        text[i] = USUAL[text[i - 1], ranks[i]]
    return text


class MadeUpSteps:
    """Answers with the usual successors, in a slightly different order each time.

    Its answers come as the eight best tokens of each row and not as logits, as they do from a GPU: choosing among
    logits is the device's work, and filling them in here would sweep the host's caches.
    """

    name, room, launching, first_of_its_kind = "made up", Room(512, NEAR, packed=True), 0.0, False

    def start(self, plan: Plan, cache: SlotCache, group: Any, top: int) -> Callable[[], Answers]:
        ids, values = zip(*(self.best_after(rows.tokens) for rows in plan.sequences), strict=True)
        choices = [own[:, 0].astype(np.int64) for own in ids]
        answers = Answers(np.arange(plan.width), choices, lambda *_: torch.empty(0), ids, values)
        return lambda: answers

    def best_after(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = 10.0 - np.arange(8) + 3 * np.random.default_rng(len(tokens)).random((len(tokens), 8))
        best = np.argsort(-logits, 1)
        ids = np.take_along_axis(USUAL[tokens], best, 1).astype(np.int32)
        return ids, np.take_along_axis(logits, best, 1).astype(np.float32)

    def fed(self, plan: Plan) -> int:
        return sum(plan.lengths)


def step_cost(budget: int, store: Store, steps: int = 200, sequences: int = 1) -> dict[str, float]:
    memory = Memory(VOCAB, store)
    model = SimpleNamespace(vocab_size=VOCAB, support=SimpleNamespace(max_positions=None, trees=True, tree_limit=None))
    engine = Engine(model, sequences, memory=memory, steps=MadeUpSteps())  # type: ignore[arg-type]
    engine.cache = SlotCache(sequences, 2 * CONTEXT)
    for number in range(sequences):
        prompt = made_up_text(CONTEXT, seed=2 + 100 * number).tolist()
        request = Request(prompt, 10**6, strategies=parse_strategy("auto"), budget=budget, remember=False)
        engine._admit(Call(), number, request)
    times: list[float] = []
    while len(times) < steps + 40:
        before = sum(sequence.stats.host_seconds for sequence in engine.active)
        reading = any(sequence.uncached > 1 for sequence in engine.active)
        engine.step()
        if not reading:
            times.append(sum(sequence.stats.host_seconds for sequence in engine.active) - before)
    total = add_up(sequence.stats for sequence in engine.active)
    return {
        "sequences": sequences,
        "budget": budget,
        "microseconds": 1e6 * float(np.median(times[40:])),
        "p95": 1e6 * float(np.percentile(times[40:], 95)),
        "rows": total.rows_per_step,
        "tokens_per_step": total.tokens_per_step,
    }


def look_ups(tokens: int) -> dict[str, float]:
    """Microseconds of one look-up for 64 rows after `tokens` were learned, by suffix and by trie."""
    store = Store(VOCAB, max_tokens=16 << 20, max_nodes=16 << 20)
    text = made_up_text(tokens, seed=3)
    start = perf_counter()
    store.learn([text[i : i + 500] for i in range(0, tokens, 500)])
    learned = perf_counter() - start
    drafter = TrieDrafter(Trie(), store, [1], remember=False)
    queries = made_up_text(2000, seed=4)
    times: dict[str, list[float]] = {"suffix": [], "trie": []}
    for end in range(LONGEST, len(queries), 7):
        ids = queries[:end].tolist()
        tail = np.array(ids[-LONGEST:], np.int32)
        start = perf_counter()
        store.find(tail, 16, 24)
        times["suffix"].append(perf_counter() - start)
        start = perf_counter()
        drafter.propose(ids, 100)
        times["trie"].append(perf_counter() - start)
    record = {f"{name}_{q}": 1e6 * float(np.percentile(t, q)) for name, t in times.items() for q in (50, 99)}
    return record | {"tokens": tokens, "learn_microseconds_per_token": 1e6 * learned / tokens, "bytes": store.nbytes}


def memory() -> list[dict[str, float]]:
    """Bytes of a store with the default bounds as more and more text is learned."""
    store, sizes = Store(VOCAB), []
    for million in range(1, 11):
        text = made_up_text(1_000_000, seed=10 + million)
        store.learn([text[i : i + 500] for i in range(0, len(text), 500)])
        sizes.append({"millions": million, "index": store.index.nbytes, "trie": store.trie.nbytes})
    return sizes


def main() -> None:
    look_ups(1000)  # compiles
    store = Store(VOCAB)
    text = made_up_text(STORED, seed=1)
    store.learn([text[i : i + 500] for i in range(0, STORED, 500)])
    step_cost(16, store, 20)
    report = {
        "steps": [step_cost(16, store), step_cost(64, store), step_cost(8, store, sequences=32)],
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
