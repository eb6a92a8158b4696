"""Benchmarks: how much faster, for this model on this machine, measured side by side."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from lookfar.bench.measure import Benchmark, methods_for
from lookfar.bench.records import Results, Run
from lookfar.bench.suites import Prompt, read_prompts, read_suite
from lookfar.bench.summary import Line, summarize
from lookfar.drafters.registry import StrategySpec, parse_strategy
from lookfar.errors import ConfigError
from lookfar.lm import LM
from lookfar.loading import load
from lookfar.speculation.row_budget import Budget

__all__ = ["Line", "Results", "Run", "run", "summarize"]


def run(
    model: LM | str = "demo",
    *,
    suites: Seq[str] = (),
    data: str | Path | None = None,
    prompts: str | Path | None = None,
    strategies: Seq[StrategySpec] = ("auto",),
    baselines: Seq[str] = ("generate",),
    draft: Any = None,
    budget: Budget = None,
    limit: int = 10,
    max_new_tokens: int = 128,
    batch: Seq[int] = (1,),
    repeats: int = 1,
    out: str | Path | None = None,
    **sampling: Any,
) -> Results:
    """Decode the prompts of suites, or of a file, with every method in turn.

    `suites` are read from `data`, a directory of jsonl files, or from the hub. `baselines` are modes of transformers:
    "generate", "prompt_lookup", and "assisted" with a `draft` model. Our own decoding without speculation always runs.
    Calls that the file `out` holds already are not measured again. Other arguments are for sampling:
    `temperature=0.7`, …
    """
    _check_numbers(batch, limit=limit, max_new_tokens=max_new_tokens, repeats=repeats)
    read = _read(suites, data, prompts, limit)
    lm = _lm(model, max(batch))
    draft = _lm(draft, 1).model if isinstance(draft, str) else draft
    methods = methods_for(strategies, baselines, draft, budget, batch)
    settings = {
        "model": Path(lm.model.config.name_or_path or lm.engine.runner.model.support.model_type).name,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "methods": [method.name for method in methods],
        "strategies": [[repr(part) for part in parse_strategy(spec)] for spec in strategies],
        "budget": budget,
        "suites": {name: [prompt.id for prompt in found] for name, found in read.items()},
        "max_new_tokens": max_new_tokens,
        "batch": list(batch),
        "repeats": repeats,
        "sampling": sampling,
    }
    benchmark = Benchmark(
        lm,
        read,
        methods,
        max_new_tokens,
        batch,
        repeats,
        sampling,
        settings,
        Path(out) if out is not None else None,
    )
    return benchmark.run()


def _check_numbers(batch: Seq[int], **numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
    if not batch or not all(isinstance(b, int) and b >= 1 for b in batch):
        raise ConfigError(f"batch takes whole numbers of at least 1, not {batch!r}.")


def _read(suites: Seq[str], data: str | Path | None, prompts: str | Path | None, limit: int) -> dict[str, list[Prompt]]:
    """Return the prompts by suite; a file of prompts is a suite of its own."""
    if bool(suites) == (prompts is not None):
        raise ConfigError("Give suites or a file of prompts, one of the two.")
    if prompts is not None:
        return {Path(prompts).stem: read_prompts(Path(prompts), limit)}
    return {name: read_suite(name, Path(data) if data is not None else None, limit) for name in suites}


def _lm(model: LM | str, batch: int) -> LM:
    return model if isinstance(model, LM) else load(model, max_batch=batch)
