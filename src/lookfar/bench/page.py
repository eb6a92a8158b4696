"""The report of a benchmark as one self-contained page, and its rows for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from lookfar.bench import plots
from lookfar.bench.plots import Axes
from lookfar.bench.records import Results, Run
from lookfar.bench.summary import Line, by_depth, summarize
from lookfar.pages import render

HEADINGS = (
    "suite",
    "method",
    "batch",
    "tokens/s",
    "× generate",
    "× none",
    "× none, natural",
    "tokens/step",
    "natural",
    "rows/step",
    "first token",
    "ms/token p50",
    "p95",
    "peak memory",
    "identical",
)
PAGE_HEADINGS = (
    "method",
    "tokens/s",
    "× generate",
    "× none",
    "tokens per step",
    "rows per step",
    "first token",
    "ms per token",
    "peak memory",
    "identical",
)
TERMINAL_HEADINGS = ("", "tok/s", "× generate", "× none", "tokens/step", "rows", "same")
CHART_WIDTH = 480  # two beside each other on a wide screen, and legible on a phone


def page(results: Results) -> str:
    """Return a whole report."""
    lines, settings = summarize(results), results.settings
    asked = f"{settings.get('max_new_tokens')} new tokens"
    if settings.get("sampling"):
        asked += ", " + ", ".join(f"{k} {v}" for k, v in settings["sampling"].items())
    return render(
        "bench.html",
        model=settings.get("model"),
        settings=asked,
        machine=" · ".join(f"{key} {value}" for key, value in results.machine.items()),
        headings=PAGE_HEADINGS,
        groups=groups_of(lines),
        differences=[
            f"{line.method} on {line.suite}: first at token {line.first_difference.token} of "
            f"{line.first_difference.prompt}"
            for line in lines
            if line.first_difference is not None
        ],
        charts=[Markup(chart) for chart in charts_of(results, lines)],
        sources=[
            (line.suite, line.method, source, f"{share:.1%}")
            for line in lines
            for source, share in line.acceptance.items()
        ],
    )


def cells(line: Line) -> list[str]:
    """Return a line as text, by heading."""

    def times(value: float | None) -> str:
        return f"{value:.2f}×" if value is not None else "–"

    return [
        line.suite,
        line.method,
        str(line.batch),
        f"{line.tokens_per_second:.1f}",
        times(line.over_generate),
        times(line.over_none),
        times(line.over_none_natural),
        f"{line.tokens_per_step:.2f}",
        f"{line.tokens_per_step_natural:.2f}" if line.tokens_per_step_natural is not None else "–",
        f"{line.rows_per_step:.1f}" if line.rows_per_step is not None else "–",
        f"{1e3 * line.first_token:.0f} ms",
        f"{1e3 * line.latency_p50:.1f}",
        f"{1e3 * line.latency_p95:.1f}",
        f"{line.peak_bytes / 2**20:.0f} MiB",
        f"{line.identical}/{line.outputs}",
    ]


def groups_of(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the rows of a page, those of one suite and batch size together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        name = line.suite if line.batch == 1 else f"{line.suite}, batches of {line.batch}"
        name = f"{name}: {line.outputs} prompts, {line.natural} with natural outputs"
        row = {"cells": page_row(line), "differs": line.identical < line.outputs}
        groups.setdefault(name, []).append(row)
    return [{"name": name, "rows": rows} for name, rows in groups.items()]


def page_row(line: Line) -> list[str]:
    """Return a line as text, by `PAGE_HEADINGS`; natural outputs in brackets."""
    whole = dict(zip(HEADINGS, cells(line), strict=True))
    return [
        line.method,
        whole["tokens/s"],
        whole["× generate"],
        f"{whole['× none']} ({whole['× none, natural']})",
        f"{whole['tokens/step']} ({whole['natural']})",
        whole["rows/step"],
        whole["first token"],
        f"{whole['ms/token p50']} · {whole['p95']}",
        whole["peak memory"],
        whole["identical"],
    ]


def terminal_row(line: Line) -> list[str]:
    """Return what fits on a terminal; natural outputs in brackets."""
    whole = dict(zip(HEADINGS, cells(line), strict=True))
    return [
        f"  {line.method}",
        whole["tokens/s"],
        whole["× generate"],
        f"{whole['× none']} ({whole['× none, natural'].rstrip('×')})",
        f"{whole['tokens/step']} ({whole['natural']})",
        whole["rows/step"],
        whole["identical"],
    ]


def charts_of(results: Results, lines: list[Line]) -> list[str]:
    """Return the charts of a report."""
    ours = {run.method for run in results.runs if run.drafts}
    drafting = [run for run in results.runs if run.method in ours]
    charts = [
        speed_ups(lines, CHART_WIDTH),
        histogram(drafting),
        costs(results, drafting),
        depths(drafting),
        latency(results.runs),
    ]
    return [chart for chart in charts if chart]


def speed_ups(lines: list[Line], width: int = plots.WIDTH) -> str:
    """Draw the speed-up over `model.generate` if it ran, otherwise over decoding without speculation."""
    measured = any(line.over_generate is not None for line in lines)
    groups: dict[str, dict[str, float]] = {}
    for line in lines:
        value = line.over_generate if measured else line.over_none
        label = line.suite if line.batch == 1 else f"{line.suite}, batch {line.batch}"
        if value is not None:
            groups.setdefault(label, {})[line.method] = value
    over = "model.generate" if measured else "decoding without speculation"
    return plots.bars(f"Speed-up over {over}", groups, "×", 1.0, width)


def histogram(runs: Iterable[Run]) -> str:
    """Draw how many steps emitted how many tokens."""
    groups: dict[str, Counter[int]] = {}
    for run in runs:
        groups.setdefault(run.method, Counter()).update(min(tokens, 12) for _, _, tokens in run.steps)
    shares = {
        f"{size}{'+' if size == 12 else ''}": {
            name: counts[size] / counts.total() for name, counts in groups.items() if counts.total()
        }
        for size in range(1, 13)
    }
    return plots.bars("Share of steps by emitted tokens", shares, width=CHART_WIDTH) if groups else ""


def costs(results: Results, runs: Iterable[Run]) -> str:
    """Draw the milliseconds of a step by rows, and the median of the rows that were used."""
    curve = [(float(rows), 1e3 * seconds) for rows, seconds in results.costs.items()]
    used = sorted(rows for run in runs for _, rows, _ in run.steps)
    mark = float(used[len(used) // 2]) if used else None
    title = "Cost of a step; dashed: median of the rows used"
    return plots.lines(title, {"ms": curve}, Axes("rows", "ms", log=True, width=CHART_WIDTH), mark=mark)


def depths(runs: list[Run]) -> str:
    """Draw the acceptance of draft tokens by depth and source."""
    series = {
        source: [(float(i + 1), right / verified) for i, (verified, right) in enumerate(found[:12]) if verified >= 5]
        for source, found in by_depth(runs).items()
    }
    shown = {name: line for name, line in series.items() if line}
    return plots.lines("Share of draft tokens accepted, by depth and drafter", shown, Axes("depth", width=CHART_WIDTH))


def latency(runs: Iterable[Run]) -> str:
    """Draw the milliseconds per token along the output, averaged over prompts."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(run.method for run in runs):
        places: dict[int, list[float]] = {}
        for run in runs:
            if run.method == name and len(run.outputs) == 1:
                at = 0
                for seconds, _, tokens in run.steps:
                    for _ in range(tokens):
                        places.setdefault(at // 8, []).append(1e3 * seconds / tokens)
                        at += 1
        line = [(8.0 * place + 4, sum(found) / len(found)) for place, found in sorted(places.items()) if place]
        if len(line) > 1:
            series[name] = line
    return plots.lines(
        "Milliseconds per token along the output", series, Axes("token", "ms", width=CHART_WIDTH), dots=False
    )
