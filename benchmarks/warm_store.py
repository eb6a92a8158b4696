"""The gain from past texts: tokens per step without a store, with answers to other questions, and in a second pass.

    python benchmarks/warm_store.py --data DIR --suite gsm8k --limit 40

The store is built from the reference answers of the second half of the suite, and the first half is decoded: *cold*
(the draft state is emptied before each prompt), *warm* (the same with that store), *in a row* (an empty draft state is
kept from prompt to prompt), and *again* (a second pass with the draft state of the first). Prints a table and one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from prompts import read_prompts
from rich.console import Console
from rich.table import Table

import lookfar
from lookfar.core.progress import progress_bar
from lookfar.engine.stats import add_up, is_natural


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suite", default="gsm8k")
    parser.add_argument("--limit", type=int, default=40, help="prompts of the first half to decode")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()

    lm = lookfar.load("demo", dtype="float32", device=options.device, max_batch=1)
    path = options.data / f"{options.suite}.jsonl"
    items = [json.loads(line) for line in path.read_text().splitlines()]
    half = len(items) // 2
    prompts = read_prompts(lm, path, min(options.limit, half))
    stored = Path(tempfile.mkdtemp()) / "answers.store"
    lm.store.learn([item["reference"] for item in items[half:]])
    lm.store.save(stored)
    learned = lm.store.tokens

    outputs: dict[str, list[lookfar.Completion]] = {"cold": [], "warm": [], "in a row": [], "again": []}
    with progress_bar("Decoding", 4 * len(prompts)) as advance:
        for name, done in outputs.items():
            if name != "again":
                lm.forget()
            for prompt in prompts:
                if name in ("cold", "warm"):
                    lm.forget()
                if name == "warm":
                    lm.store.load(stored)
                done.append(
                    lm.generate(
                        prompt,
                        max_new_tokens=options.max_new_tokens,
                        strategy=options.strategy,
                        budget=options.budget,
                    )
                )
                advance(1)
    natural = [is_natural(done.token_ids) for done in outputs["cold"]]
    table = Table(
        "draft state", "tokens/step, all", "natural", title=f"{options.suite}, {learned} tokens of answers stored"
    )
    report = {"suite": options.suite, "prompts": len(prompts), "stored_tokens": learned, "budget": options.budget}
    for name, done in outputs.items():
        assert [d.token_ids for d in done] == [d.token_ids for d in outputs["cold"]]
        every = add_up(d.stats for d in done).tokens_per_step
        without_loops = add_up(d.stats for d, n in zip(done, natural, strict=True) if n).tokens_per_step
        table.add_row(name, f"{every:.2f}", f"{without_loops:.2f}")
        report[name] = [every, without_loops]
    Console(width=100).print(table)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
