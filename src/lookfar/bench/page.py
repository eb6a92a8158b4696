"""The report as one self-contained page: tables and charts, no scripts, nothing fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape

from lookfar.bench import plots
from lookfar.bench.records import Results, Run
from lookfar.bench.summary import Line, by_depth, summarize

STYLE = """
:root{--ink:#1d2430;--dim:#6b7485;--line:#d6dbe4;--paper:#fff;--soft:#f4f6fa}
@media (prefers-color-scheme:dark){:root{--ink:#e8ebf1;--dim:#98a1b3;--line:#3a4252;--paper:#171b23;--soft:#202631}}
body{margin:0 auto;max-width:1240px;padding:24px;background:var(--paper);color:var(--ink);
  font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 8px}.dim{color:var(--dim)}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--line)}
td{white-space:nowrap}th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}.scroll{overflow-x:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:16px}
.charts figure{margin:0;background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:8px}
.bad{color:#ef4444;font-weight:600}
"""
HEADINGS = (
    "suite",
    "contestant",
    "batch",
    "tokens/s",
    "× generate",
    "× plain",
    "× plain, natural",
    "tokens/step",
    "natural",
    "rows/step",
    "first token",
    "ms/token p50",
    "p95",
    "peak memory",
    "identical",
)


def page(results: Results) -> str:
    """A whole report."""
    lines = summarize(results)
    facts = " · ".join(f"{key} {value}" for key, value in results.machine.items())
    settings = results.settings
    asked = f"{settings.get('model')}, {settings.get('max_new_tokens')} new tokens"
    if settings.get("sampling"):
        asked += ", " + ", ".join(f"{k} {v}" for k, v in settings["sampling"].items())
    charts = "".join(f"<figure>{chart}</figure>" for chart in charts_of(results, lines) if chart)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>lookfar bench</title><style>{STYLE}</style></head><body><h1>How much faster?</h1>"
        f'<p class="dim">{escape(asked)}<br>{escape(facts)}</p>'
        f'<div class="scroll"><table><tr>{"".join(f"<th>{h}</th>" for h in HEADINGS)}</tr>'
        f"{''.join(map(_row, lines))}</table></div>{_differences(lines)}"
        f'<h2>Charts</h2><div class="charts">{charts}</div>{_sources(lines)}</body></html>'
    )


def cells(line: Line) -> list[str]:
    """A line as text, for the page and for the terminal."""

    def times(value: float | None) -> str:
        return f"{value:.2f}×" if value is not None else "–"

    return [
        line.suite,
        line.contestant,
        str(line.batch),
        f"{line.tokens_per_second:.1f}",
        times(line.over_generate),
        times(line.over_plain),
        times(line.over_plain_natural),
        f"{line.tokens_per_step:.2f}",
        f"{line.tokens_per_step_natural:.2f}" if line.tokens_per_step_natural is not None else "–",
        f"{line.rows_per_step:.1f}" if line.rows_per_step is not None else "–",
        f"{1e3 * line.first_token:.0f} ms",
        f"{1e3 * line.latency_p50:.1f}",
        f"{1e3 * line.latency_p95:.1f}",
        f"{line.peak_bytes / 2**20:.0f} MiB",
        f"{line.identical}/{line.outputs}",
    ]


def by_heading(line: Line) -> dict[str, str]:
    return dict(zip(HEADINGS, cells(line), strict=True))


def brief(line: Line) -> list[str]:
    """What fits on a terminal; natural outputs in brackets."""
    whole = by_heading(line)
    return [
        f"  {line.contestant}",
        whole["tokens/s"],
        whole["× generate"],
        f"{whole['× plain']} ({whole['× plain, natural'].rstrip('×')})",
        f"{whole['tokens/step']} ({whole['natural']})",
        whole["rows/step"],
        whole["identical"],
    ]


BRIEF = ("", "tok/s", "× generate", "× plain", "tokens/step", "rows", "same")


def _row(line: Line) -> str:
    made = [f"<td>{escape(cell)}</td>" for cell in cells(line)]
    if line.identical < line.outputs:
        made[-1] = f'<td class="bad">{line.identical}/{line.outputs}</td>'
    return f"<tr>{''.join(made)}</tr>"


def _differences(lines: list[Line]) -> str:
    parted = [line for line in lines if line.first_difference is not None]
    if not parted:
        return '<p class="dim">All outputs are identical to the reference (model.generate, or plain decoding).</p>'
    items = "".join(
        f"<li>{escape(line.contestant)} on {escape(line.suite)}: first at token {line.first_difference.token} of "
        f"{escape(line.first_difference.prompt)}</li>"
        for line in parted
        if line.first_difference is not None
    )
    return f'<p class="bad">Outputs differ from the reference:</p><ul>{items}</ul>'


def _sources(lines: list[Line]) -> str:
    rows = "".join(
        f"<tr><td>{escape(line.suite)}</td><td>{escape(line.contestant)}</td><td>{escape(source)}</td><td>{share:.1%}</td></tr>"
        for line in lines
        for source, share in line.acceptance.items()
    )
    if not rows:
        return ""
    heads = "".join(f"<th>{head}</th>" for head in ("suite", "contestant", "source", "share"))
    return f"<h2>Guesses accepted</h2><table><tr>{heads}</tr>{rows}</table>"


def charts_of(results: Results, lines: list[Line]) -> list[str]:
    ours = {run.contestant for run in results.runs if run.guesses}
    guessing = [run for run in results.runs if run.contestant in ours]
    made = [speed_ups(lines), histogram(guessing), costs(results, guessing), depths(guessing), latency(results.runs)]
    return [chart for chart in made if chart]


def speed_ups(lines: list[Line]) -> str:
    """Over `model.generate` if it ran, otherwise over plain decoding."""
    measured = any(line.over_generate is not None for line in lines)
    groups: dict[str, dict[str, float]] = {}
    for line in lines:
        value = line.over_generate if measured else line.over_plain
        label = line.suite if line.batch == 1 else f"{line.suite}, batch {line.batch}"
        if value is not None:
            groups.setdefault(label, {})[line.contestant] = value
    over = "model.generate" if measured else "plain decoding"
    return plots.bars(f"Speed-up over {over}", groups, "×", mark=1.0)


def histogram(runs: Iterable[Run]) -> str:
    """How many steps gave how many tokens."""
    groups: dict[str, Counter[int]] = {}
    for run in runs:
        groups.setdefault(run.contestant, Counter()).update(min(tokens, 12) for _, _, tokens in run.steps)
    shares = {
        f"{size}{'+' if size == 12 else ''}": {
            name: counts[size] / counts.total() for name, counts in groups.items() if counts.total()
        }
        for size in range(1, 13)
    }
    return plots.bars("Share of steps by tokens that came out", shares) if groups else ""


def costs(results: Results, runs: Iterable[Run]) -> str:
    """Milliseconds by rows, and where the budget lay in the median."""
    curve = [(float(rows), 1e3 * seconds) for rows, seconds in results.costs.items()]
    chosen = sorted(rows for run in runs for _, rows, _ in run.steps)
    mark = float(chosen[len(chosen) // 2]) if chosen else None
    return plots.lines(
        "Cost of a step; dashed: rows fed in the median", {"ms": curve}, "rows", "ms", log=True, mark=mark
    )


def depths(runs: list[Run]) -> str:
    """Acceptance by depth and source."""
    series = {
        source: [(float(i + 1), right / fed) for i, (fed, right) in enumerate(found[:12]) if fed >= 5]
        for source, found in by_depth(runs).items()
    }
    shown = {name: line for name, line in series.items() if line}
    return plots.lines("Share of guesses accepted, by depth and source", shown, "depth of the guess")


def latency(runs: Iterable[Run]) -> str:
    """Milliseconds a token along the output, averaged over prompts."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(run.contestant for run in runs):
        places: dict[int, list[float]] = {}
        for run in runs:
            if run.contestant == name and len(run.outputs) == 1:
                at = 0
                for seconds, _, tokens in run.steps:
                    for _ in range(tokens):
                        places.setdefault(at // 8, []).append(1e3 * seconds / tokens)
                        at += 1
        line = [(8.0 * place + 4, sum(found) / len(found)) for place, found in sorted(places.items()) if place]
        if len(line) > 1:
            series[name] = line
    return plots.lines("Milliseconds a token, along the output", series, "token", "ms", dots=False)
