"""Structured output: is it that of transformers with the same constraint, and how many tokens per step?

    python benchmarks/structured.py --data DIR --limit 10

Every prompt is answered in JSON by a schema, once with JSON's optional whitespace and once with fixed whitespace, by
`model.generate` with the constraint as a logits processor, by lookfar without speculation and by lookfar, in turn.
Prints a table and one JSON line. Bounded by how much of an answer the schema forces.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from prompts import read_prompts
from rich.console import Console
from rich.table import Table

import lookfar
from lookfar.core.progress import progress_bar
from lookfar.engine.stats import add_up
from lookfar.sampling.grammar import constrain

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "topic": {"enum": ["writing", "reasoning", "coding", "facts", "other"]},
        "short_answer": {"type": "string", "maxLength": 60},
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
        "confidence_in_percent": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["topic", "short_answer", "keywords", "confidence_in_percent"],
    "additionalProperties": False,
}
FIXED = SCHEMA | {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suite", default="mt_bench")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    lm = lookfar.load("demo", dtype="float32")
    prompts = read_prompts(lm, options.data / f"{options.suite}.jsonl", options.limit)
    sampling = {"temperature": options.temperature} if options.temperature else {}
    rows = []
    with progress_bar("Decoding", 2 * len(prompts)) as advance:
        for name, schema in (("optional whitespace", SCHEMA), ("fixed whitespace", FIXED)):
            lm.forget()
            calls = []
            for seed, prompt in enumerate(prompts):
                calls.append(one(lm, prompt, seed, schema, options.max_new_tokens, sampling))
                advance(1)
            rows.append({"schema": name} | summary(calls))
    table = Table(
        "schema", "identical", "valid", "tokens/step", "accepted from the grammar", "÷ generate", "÷ no speculation"
    )
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=120).print(table)
    print(json.dumps(rows))


def one(
    lm: lookfar.LM, prompt: list[int], seed: int, schema: dict[str, Any], new: int, sampling: dict[str, float]
) -> dict[str, Any]:
    ids = torch.tensor([prompt], device=lm.device)
    start = perf_counter()
    torch.manual_seed(seed)
    expected = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=bool(sampling),
        logits_processor=[constrain(lm.tokenizer, json_schema=schema)],
        **sampling,
    )[0, len(prompt) :].tolist()
    seconds = perf_counter() - start
    arguments = {"max_new_tokens": new, "seed": seed, "json_schema": schema, **sampling}
    baseline = lm.generate(prompt, strategy="none", **arguments)
    done = lm.generate(prompt, **arguments)
    try:
        valid = set(json.loads(done.text)) == set(schema["required"])
    except json.JSONDecodeError:
        valid = done.finish_reason == "length"  # cut off, not wrong
    return {
        "identical": done.token_ids == baseline.token_ids == expected,
        "valid": valid,
        "stats": done.stats,
        "over_generate": seconds / done.stats.seconds,
        "over_none": baseline.stats.seconds / done.stats.seconds,
    }


def summary(calls: list[dict[str, Any]]) -> dict[str, Any]:
    total = add_up(call["stats"] for call in calls)
    return {
        "identical": f"{sum(call['identical'] for call in calls)}/{len(calls)}",
        "valid": f"{sum(call['valid'] for call in calls)}/{len(calls)}",
        "tokens_per_step": total.tokens_per_step,
        "accepted": f"{total.drafter('grammar').accepted} of {total.drafter('grammar').proposed}",
        "over_generate": median(call["over_generate"] for call in calls),
        "over_none": median(call["over_none"] for call in calls),
    }


if __name__ == "__main__":
    main()
