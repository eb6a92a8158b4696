"""The experiments of Lookahead / PAIN (Zhao et al. 2024) with this implementation.

    python benchmarks/paper/pain.py --data DIR --out docs/results && python benchmarks/tables.py

The grid of decoding and branch lengths; which branches are inserted, and pruning; single, parallel and hierarchical
drafts; warm-up size against tokens per step; memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import Experiments

from lookfar import Trie
from lookfar.retrieval.draft_store import DraftStore

LENGTHS, BRANCHES = (4, 8, 16, 32, 64), (4, 8, 16, 32)
WARM_UPS = (0, 10, 30, 100)


def grid(found: Experiments) -> None:
    found.measure("grid", "gsm8k", "none", method="none")
    for branch in BRANCHES:
        for length in LENGTHS:
            strategy = Trie(decoding_length=length, branch_length=branch)
            found.measure("grid", "gsm8k", strategy, decoding_length=length, branch_length=branch)


def insertion(found: Experiments) -> None:
    found.measure("insertion", "gsm8k", "none", method="none")
    for source in ("prompt", "output", "mixed"):
        found.measure("insertion", "gsm8k", Trie(source=source), source=source)
    vocabulary = found.lm.engine.runner.model.vocab_size
    for nodes in (500, 2_000, 20_000, 200_000):
        store = DraftStore(vocabulary, found.lm.tokenizer, max_nodes=nodes)
        row = found.measure("pruning", "gsm8k", Trie(), store, max_nodes=nodes)
        row["trie_bytes"] = store.trie.nbytes


def shapes(found: Experiments) -> None:
    found.measure("shapes", "humaneval", "none", method="none")
    for shape in ("single", "parallel", "hierarchical"):
        found.measure("shapes", "humaneval", Trie(shape=shape), shape=shape)


def warm_up(found: Experiments) -> None:
    """The store first learns answers to other questions of the same kind."""
    found.measure("warm-up", "gsm8k", "none", method="none")
    lines = (found.options.data / "gsm8k.jsonl").read_text().splitlines()[found.options.limit :]
    answers = [json.loads(line).get("reference") or "" for line in lines]
    for size in (size for size in WARM_UPS if size <= len(answers)):
        store = DraftStore(found.lm.engine.runner.model.vocab_size, found.lm.tokenizer)
        if size:
            store.learn(answers[:size])
        row = found.measure("warm-up", "gsm8k", Trie(), store, answers=size)
        row["store_bytes"] = store.nbytes


if __name__ == "__main__":
    sections = {"grid": grid, "insertion": insertion, "shapes": shapes, "warm-up": warm_up}
    Experiments(__doc__, sections).run("pain")
