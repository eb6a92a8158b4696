"""What the simulation of benchmarks/scaling.py needs of the demo model, recorded once into a folder.

    python benchmarks/scaling_record.py texts --data DIR --out .recorded
    python benchmarks/scaling_record.py rows --data DIR --out .recorded

`texts` are prompts and their greedy answers, to be decoded again without the model. `rows` are tokens per step of
`auto` trees by the rows of a step. Both go on where they were stopped; `--count` ends them early.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from prompts import read_prompts

import lookfar
from lookfar.engine.stats import add_up, is_natural

BATCH = 8
SUITES = ("gsm8k", "mbpp", "humaneval", "dolly")  # of texts
ROW_SUITES = ("mt_bench", "humaneval", "gsm8k")
ROWS = "2,4,8,16,32,64,128,256"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def record_texts(options: argparse.Namespace) -> None:
    """Decode prompts in batches and keep the token ids of prompts and answers."""
    path = options.out / "texts.json"
    found: dict[str, Any] = read(path)
    lm = lookfar.load("demo", dtype="float32", budget=4, strategy="auto", max_batch=BATCH)
    left = options.count
    for suite in SUITES:
        prompts = read_prompts(lm, options.data / f"{suite}.jsonl", options.limit)
        texts = found.setdefault(suite, [])
        while len(texts) < len(prompts) and left > 0:
            batch = list(islice(prompts, len(texts), len(texts) + min(BATCH, left)))
            done = lm.generate(batch, max_new_tokens=options.max_new_tokens)
            texts += [[prompt, one.token_ids] for prompt, one in zip(batch, done, strict=True)]
            left -= len(batch)
            path.write_text(json.dumps(found))
    print({suite: len(texts) for suite, texts in found.items()}, flush=True)


def record_rows(options: argparse.Namespace) -> None:
    """Decode prompts with fixed row budgets, each from an empty draft state that is kept from prompt to prompt."""
    path = options.out / "rows.json"
    found: dict[str, Any] = read(path)
    lm = lookfar.load("demo", dtype="float32", strategy="auto", max_batch=1)
    left = options.count
    for rows in map(int, options.rows.split(",")):
        for suite in ROW_SUITES:
            key = f"{suite} {rows}"
            if key in found or left <= 0:
                continue
            lm.forget()
            prompts = read_prompts(lm, options.data / f"{suite}.jsonl", options.limit)
            done = [lm.generate(prompt, max_new_tokens=options.max_new_tokens, budget=rows) for prompt in prompts]
            natural = [one.stats for one in done if is_natural(one.token_ids)]
            total, part = add_up(one.stats for one in done), add_up(natural)
            found[key] = {
                "prompts": len(prompts),
                "natural": len(natural),
                "tokens_per_step": total.tokens_per_step,
                "natural_tokens_per_step": part.tokens_per_step,
                "rows_per_step": total.rows_per_step,
            }
            print(key, found[key], flush=True)
            path.write_text(json.dumps(found))
            left -= 1


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace], None]] = {"texts": record_texts, "rows": record_rows}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=parts)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(".recorded"))
    parser.add_argument("--limit", type=int, default=160, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rows", default=ROWS, help="row budgets")
    parser.add_argument("--count", type=int, default=1 << 30, help="stop after so many texts, or rows of a suite")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts[options.what](options)


if __name__ == "__main__":
    main()
