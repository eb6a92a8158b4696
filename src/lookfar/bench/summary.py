"""Records → the numbers of a table. Times are medians over repeats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from lookfar.bench.records import Results, Run
from lookfar.core.ids import first_difference
from lookfar.engine.stats import is_natural

REFERENCES = ("hf generate", "none")  # methods whose outputs are the reference: the first that ran


@dataclass(frozen=True)
class Difference:
    """The place where an output first differs from the reference."""

    prompt: str
    token: int


@dataclass(frozen=True)
class Line:
    """One method on one suite with one batch size."""

    suite: str
    method: str
    batch: int
    outputs: int
    natural: int  # of those outputs
    tokens_per_second: float
    over_none: float | None  # speed-up over decoding without speculation; None if that did not run
    over_generate: float | None
    over_none_natural: float | None
    tokens_per_step: float
    tokens_per_step_natural: float | None
    rows_per_step: float | None  # None where transformers does not report them
    acceptance: dict[str, float]  # source → share of its draft tokens that were accepted
    first_token: float
    latency_p50: float  # seconds per token: the time of a step over its tokens
    latency_p95: float
    peak_bytes: int
    identical: int
    first_difference: Difference | None


def summarize(results: Results) -> list[Line]:
    """Return a line for each suite, batch size and method, in the order in which they were asked for."""
    groups = dict.fromkeys((run.suite, run.batch) for run in results.runs)
    ran = {(run.suite, run.batch, run.method) for run in results.runs}
    kinds = [(*group, name) for group in groups for name in results.settings["methods"]]
    return [_line(results, *kind) for kind in kinds if kind in ran]


def _line(results: Results, suite: str, batch: int, method: str) -> Line:
    def of(name: str) -> list[Run]:
        return [r for r in results.runs if (r.suite, r.batch, r.method) == (suite, batch, name)]

    runs = of(method)
    right = next((found for name in REFERENCES if (found := of(name))), runs)
    outputs = outputs_of(right)
    natural = {prompt for prompt, output in outputs.items() if is_natural(output)}
    both = [run for run in runs if natural.issuperset(run.prompts)]
    differences = [
        Difference(prompt, at)
        for prompt, output in outputs_of(runs).items()
        if prompt in outputs and (at := first_difference(outputs[prompt], output)) is not None
    ]
    latencies = [seconds / tokens for run in runs for seconds, _, tokens in run.steps for _ in range(tokens)]
    p50, p95 = np.percentile(latencies, (50, 95)) if latencies else (0.0, 0.0)
    rows = [rows for run in runs for _, rows, _ in run.steps]
    none, generate = of("none"), of("hf generate")
    return Line(
        suite=suite,
        method=method,
        batch=batch,
        outputs=len(outputs_of(runs)),
        natural=len(natural),
        tokens_per_second=sum(run.tokens for run in runs if run.repeat == 0) / total(runs),
        over_none=total(none) / total(runs) if none else None,
        over_generate=total(generate) / total(runs) if generate else None,
        over_none_natural=_ratio(none, both, natural),
        tokens_per_step=per_step(runs),
        tokens_per_step_natural=per_step(both) if both else None,
        rows_per_step=sum(rows) / len(rows) if any(rows) else None,
        acceptance=acceptance(runs),
        first_token=median(run.first_token for run in runs),
        latency_p50=float(p50),
        latency_p95=float(p95),
        peak_bytes=max(run.peak_bytes for run in runs),
        identical=len(outputs_of(runs)) - len(differences),
        first_difference=min(differences, key=lambda found: found.token, default=None),
    )


def outputs_of(runs: Iterable[Run]) -> dict[str, list[int]]:
    """Return the output of each prompt, of the first repeat."""
    return {p: o for run in runs if run.repeat == 0 for p, o in zip(run.prompts, run.outputs, strict=True)}


def total(runs: Iterable[Run]) -> float:
    """Return the seconds for all prompts once: for each call the median over its repeats."""
    by_call: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        by_call.setdefault(tuple(run.prompts), []).append(run.seconds)
    return sum(map(median, by_call.values()))


def _ratio(base: list[Run], runs: list[Run], natural: set[str]) -> float | None:
    base = [run for run in base if natural.issuperset(run.prompts)]
    return total(base) / total(runs) if base and runs else None


def per_step(runs: Iterable[Run]) -> float:
    steps = [tokens for run in runs for _, _, tokens in run.steps]
    return sum(steps) / len(steps) if steps else 0.0


def acceptance(runs: Iterable[Run]) -> dict[str, float]:
    shares = {}
    for source, depths in by_depth(runs).items():
        fed = sum(a for a, _ in depths)
        shares[source] = sum(b for _, b in depths) / fed if fed else 0.0
    return shares


def by_depth(runs: Iterable[Run]) -> dict[str, list[tuple[int, int]]]:
    """Return for each source, by depth, the draft tokens that were verified and accepted."""
    added: dict[str, list[tuple[int, int]]] = {}
    for run in runs:
        for source, depths in run.drafts.items():
            mine = added.setdefault(source, [])
            mine += [(0, 0)] * (len(depths) - len(mine))
            for i, (fed, right) in enumerate(depths):
                mine[i] = mine[i][0] + fed, mine[i][1] + right
    return added
