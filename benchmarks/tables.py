"""The tables and figures of README and docs, and the plots in docs/img, from the JSON files in docs/results.

    python benchmarks/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a single figure between `<!-- value: NAME -->` and
`<!-- end -->`. Both are replaced; a test checks that none is out of date. The files come from `benchmarks/figures.py`,
`benchmarks/gpu.py`, `benchmarks/scaling.py` and `benchmarks/paper/*.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "paper"))
import cpu_tables
import picture
from cpu_tables import DOCS, SUITES, read, table
from law import law
from scaling import fleet_table, ranks_table

from lookfar.bench import plots
from lookfar.bench.page import HEADINGS, cells, speed_ups
from lookfar.bench.plots import Axes
from lookfar.bench.records import Results
from lookfar.bench.summary import Line, outputs_of, summarize, total
from lookfar.engine.stats import is_natural

PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
Rows = list[dict[str, Any]]


def of(name: str, section: str) -> Rows:
    """Return the rows of a paper's experiment, without the baseline, which is 1.00 by definition."""
    rows: Rows = read(name)["rows"]
    return [row for row in rows if row["section"] == section and row.get("method") != "none"]


def of_columns(columns: dict[str, str], rows: Rows) -> str:
    """Return a table, given the format of the cells below each heading."""
    return table(list(columns), ([cell.format(**row) for cell in columns.values()] for row in rows))


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def pair(row: dict[str, Any], name: str, form: str = ".2f") -> str:
    """Return a figure over all outputs and over natural ones."""
    return f"{number(row.get(name), form)} / {number(row.get(f'natural_{name}'), form)}"


def gpu_speed() -> str:
    return table(
        ("", "tokens/s, all / natural", "tokens/step, all / natural", "rows/step", "host µs/step"),
        (
            (
                row["mode"],
                pair(row, "tokens_per_second", ",.0f"),
                pair(row, "tokens_per_step"),
                number(row.get("rows_per_step"), ".0f"),
                number(row.get("host_microseconds"), ".0f"),
            )
            for row in read("gpu")["speed"]
            if "tokens_per_second" in row or "host_microseconds" in row
        ),
    )


def gpu_steps() -> str:
    found = [row for row in read("gpu")["steps"] if row.get("requests", 1) == 1]
    kinds = dict.fromkeys((row["mode"], row["context"]) for row in found)

    def line(mode: str, context: int) -> list[str]:
        mine = [row for row in found if (row["mode"], row["context"]) == (mode, context)]
        ms = [f"{row['ms']:.2f} ({row['device_ms']:.2f})" for row in mine if "ms" in row]
        return [f"{mode}, context {context:,}", *ms, number(mine[-1]["rows_64_over_1"])]

    return table(("", "1 row", "16 rows", "64 rows", "64 ÷ 1"), (line(*kind) for kind in kinds))


def gpu_products() -> str:
    columns = {
        "one row times": "{matrix}",
        "inputs × outputs": "{inputs:,} × {outputs:,}",
        "ours": "{ours:.1f}",
        "cuBLAS": "{cublas:.1f}",
        "ours ÷ cuBLAS": "{ratio:.2f}",
    }
    return of_columns(columns, read("gpu")["products"])


def gpu_cells() -> str:
    rows = read("gpu")["cells"]
    texts = list(dict.fromkeys(row["texts"] for row in rows))

    def line(size: int, queued: bool) -> list[str]:
        mine = {row["texts"]: row for row in rows if (row["requests"], row["queued"]) == (size, queued)}
        first = mine[texts[0]]
        speeds = f"{first['none']:,.0f} → {first['auto']:,.0f}"
        ratios = [f"{mine[name]['ratio']:.2f} ({mine[name]['first_ratio']:.2f})" for name in texts]
        what = "1" if size == 1 else f"{size}, {'queued' if queued else 'closed'}"
        return [what, speeds, ratios[0], pair(first, "tokens_per_step"), f"{first['rows_per_step']:.0f}", *ratios[1:]]

    headings = (
        "requests",
        "greedy, tokens/s: none → `auto`",
        "÷",
        "tokens/step, all / natural",
        "rows/step",
        *texts[1:],
    )
    return table(headings, (line(*key) for key in dict.fromkeys((row["requests"], row["queued"]) for row in rows)))


def gpu_serve() -> str:
    def cell(row: dict[str, Any], strategy: str, name: str) -> str:
        values = [one[name] for one in row["cells"] if one["strategy"] == strategy]
        return f"{1000 * sum(values) / len(values):.0f}"

    names = ("first_token_p50", "first_token_p99", "gap_p50", "gap_p99")
    return table(
        ("clients", "tokens/s: none → `auto`", "÷", "first token, ms: p50", "p99", "gap, ms: p50", "p99", "same texts"),
        (
            (
                str(row["clients"]),
                f"{row['none']:,.0f} → {row['auto']:,.0f}",
                f"{row['times']:.2f}",
                *(f"{cell(row, 'none', name)} → {cell(row, 'auto', name)}" for name in names),
                f"{row['same_texts']}/{row['answers']}",
            )
            for row in read("gpu")["serve"]
        ),
    )


def gpu_sampled() -> str:
    columns = {
        "": "{sampling}",
        "strategy": "{strategy}",
        "sampled in CUDA graphs, tokens/s": "{graphs:.0f}",
        "on the host, tokens/s": "{host:.0f}",
        "graphs ÷ host": "{ratio:.2f}",
    }
    rows = read("gpu")["sampled"]
    words = [", ".join(f"{name} {value}" for name, value in row["sampling"].items()) for row in rows]
    return of_columns(columns, [{**row, "sampling": sampling} for row, sampling in zip(rows, words, strict=True)])


def gpu_attention() -> str:
    columns = {
        "heads": "{heads}",
        "context": "{context:,}",
        "rows": "{rows}",
        "ours": "{ours:.1f}",
        "torch": "{sdpa:.1f}",
        "torch, with its copies": "{sdpa_and_repeat:.1f}",
        "ours ÷ torch": "{ratio:.2f}",
    }
    return of_columns(columns, read("gpu")["attention"])


def gpu_exactness() -> str:
    results = read("gpu")
    rows = [{**row, "what": f"float32, lookfar / `generate`: {row['what']}"} for row in results["float32"]]
    halves = [row for name in ("exact", "alone") for row in results.get(name, []) if "differ" in row]
    rows += [{**row, "what": f"bfloat16, {row['what']}"} for row in halves]

    def margins(row: dict[str, Any]) -> str:
        if row.get("median_margin") is None:
            return ""
        return f"{row['median_margin']:.2f} / {row['largest_margin']:.2f}"

    return table(
        ("", "outputs", "differ", "per 10,000 tokens", "logit margin there, median / largest"),
        (
            (
                row["what"],
                str(row["outputs"]),
                str(row["differ"]),
                number(row.get("per_10000_tokens"), ".0f"),
                margins(row),
            )
            for row in rows
        ),
    )


def lookahead_suites() -> str:
    return table(
        ("suite", "tokens/step, all / natural", "rows/step", "speed-up", "identical"),
        (
            (
                SUITES[row["suite"]],
                pair(row, "tokens_per_step"),
                f"{row['rows_per_step']:.0f}",
                number(row.get("speed_up"), ".2f", "×"),
                f"{row['identical']}/{row['outputs']}",
            )
            for row in of("lookahead", "suites")
        ),
    )


def lookahead_ablation() -> str:
    return table(
        ("MT-bench", "tokens/step, all / natural", "rows/step"),
        (
            (row["method"], pair(row, "tokens_per_step"), f"{row['rows_per_step']:.0f}")
            for row in of("lookahead", "ablation")
        ),
    )


def lookahead_sampling() -> str:
    rows = [{**row, "temperature": 0.0} for row in of("lookahead", "suites") if row["suite"] == "mt_bench"]
    return table(
        ("MT-bench, temperature", "tokens/step, all / natural", "identical"),
        (
            (f"{row['temperature']:g}", pair(row, "tokens_per_step"), f"{row['identical']}/{row['outputs']}")
            for row in rows + of("lookahead", "sampling")
        ),
    )


def lookahead_scaling() -> str:
    rows = of("lookahead", "scaling")
    (fitted,) = of("lookahead", "law")
    windows = list(dict.fromkeys(row["window"] for row in rows))

    def line(ngram: int) -> list[str]:
        mine = {row["window"]: row["tokens_per_step"] for row in rows if row["ngram"] == ngram}
        by_law = {w: law(fitted["alpha"], fitted["f"], ngram, w) for w in windows}
        return [f"N = {ngram}", *(f"{mine[w]:.2f} ({by_law[w]:.2f})" for w in windows)]

    ngrams = dict.fromkeys(row["ngram"] for row in rows)
    return table(("measured (law)", *(f"W = G = {w}" for w in windows)), map(line, ngrams))


def pain_grid() -> str:
    rows = of("pain", "grid")
    lengths = list(dict.fromkeys(row["decoding_length"] for row in rows))
    branches = list(dict.fromkeys(row["branch_length"] for row in rows))
    found = {(row["decoding_length"], row["branch_length"]): row for row in rows}
    return table(
        ("GSM8K, tokens/step (rows)", *(f"decoding length {length}" for length in lengths)),
        (
            [f"branch length {branch}"]
            + [
                f"{found[length, branch]['tokens_per_step']:.2f} ({found[length, branch]['rows_per_step']:.0f})"
                for length in lengths
            ]
            for branch in branches
        ),
    )


def pain_trie() -> str:
    def line(row: dict[str, Any]) -> list[str]:
        what = {
            "insertion": lambda: f"insert {row['source']}",
            "pruning": lambda: f"at most {row['max_nodes']:,} nodes",
            "shapes": lambda: f"{row['shape']} drafts",
            "warm-up": lambda: f"{row['answers']} answers in the store",
        }[row["section"]]()
        taken = row.get("trie_bytes") or row.get("store_bytes")
        return [
            SUITES[row["suite"]],
            what,
            pair(row, "tokens_per_step"),
            f"{row['rows_per_step']:.0f}",
            number(taken and taken / 2**10, ",.0f", " KiB"),
        ]

    sections = ("shapes", "insertion", "pruning", "warm-up")
    return table(
        ("suite", "", "tokens/step, all / natural", "rows/step", "memory"),
        (line(row) for section in sections for row in of("pain", section)),
    )


def bench_lines() -> list[Line]:
    return summarize(Results.load(DOCS / "results" / "bench.json"))


def bench() -> str:
    headings = (
        "suite",
        "",
        "tokens/s",
        "× `generate`",
        "× no speculation (natural)",
        "tokens/step (natural)",
        "identical",
    )

    def line(one: Line) -> list[str]:
        shown = dict(zip(HEADINGS, cells(one), strict=True))
        return [
            SUITES.get(one.suite, one.suite),
            one.method,
            shown["tokens/s"],
            shown["× generate"],
            f"{shown['× none']} ({shown['× none, natural']})",
            f"{shown['tokens/step']} ({shown['natural']})",
            shown["identical"],
        ]

    return table(headings, map(line, bench_lines()))


def natural_speed_up(suite: str) -> str:
    """Return the speed of `auto` over `model.generate` on the outputs without loops."""
    runs = [run for run in Results.load(DOCS / "results" / "bench.json").runs if run.suite == suite]
    ways = [[run for run in runs if run.method == method] for method in ("hf generate", "auto")]
    natural = {prompt for prompt, output in outputs_of(ways[0]).items() if is_natural(output)}
    slow, fast = (total(run for run in way if natural.issuperset(run.prompts)) for way in ways)
    return number(slow / fast)


def readme() -> str:
    """Return the table of the README: what else a user would call, on the same machine in the same run."""
    found = {(line.suite, line.method): line for line in bench_lines()}
    ways = {
        "`model.generate`": "hf generate",
        "its prompt lookup": "hf prompt_lookup",
        "lookfar, no speculation": "none",
        "**lookfar**": "auto",
    }

    def row(suite: str) -> list[str]:
        mine = {method: found[suite, method] for method in ways.values()}
        speeds = [f"{line.tokens_per_second:.1f}" for line in mine.values()]
        fast = mine["auto"]
        speeds[-1] = f"**{speeds[-1]}** ({number(fast.over_generate)}×, natural {natural_speed_up(suite)}×)"
        steps = f"{fast.tokens_per_step:.2f} ({number(fast.tokens_per_step_natural)})"
        return [SUITES[suite], *speeds, steps, f"{fast.identical}/{fast.outputs}"]

    suites = dict.fromkeys(suite for suite, _ in found)
    return table(("tokens per second", *ways, "tokens per step (natural)", "same text"), map(row, suites))


def gpu_cell(key: str, form: str = ",.0f", texts: str = "greedy", size: int = 1) -> str:
    """Return a figure of one request on a GPU, or of a queue of texts that are decoded `size` at a time."""
    wanted = size, texts, size > 1
    found = (cell for cell in read("gpu")["cells"] if (cell["requests"], cell["texts"], cell["queued"]) == wanted)
    return number(next(found)[key], form)


def of_picture(way: str) -> str:
    found = getattr(picture.read(), way)
    return f"{len(found)} steps and {found[-1].seconds:.1f} s"


def dropin_range() -> str:
    speeds = [row["speed_up_over_generate"] for row in cpu_tables.report("dropin")["rows"]]
    return f"{min(speeds):.1f} to {max(speeds):.1f}"


def random_speed() -> str:
    return number(cpu_tables.report("cpu_speed_random")["suites"]["random"]["all"]["auto_over_none"], ".2f", "×")


def noise_gain() -> str:
    gains = []
    for name in ("sampling_07", "sampling_1"):
        cells = cpu_tables.report(name)["cells"]
        for budget in {cell["budget"] for cell in cells}:
            with_noise, without = (
                [c for c in cells if (c["budget"], c["strategy"]) == (budget, s)] for s in ("auto", "auto/no_noise")
            )
            gains.append(cpu_tables.mean(with_noise, "tokens_per_step") / cpu_tables.mean(without, "tokens_per_step"))
    return f"{100 * (max(gains) - 1):.0f} %"


VALUES: dict[str, Callable[[], str]] = {
    "picture-generate": lambda: of_picture("generate"),
    "picture-lookfar": lambda: of_picture("lookfar"),
    "dropin-range": dropin_range,
    "random-speed": random_speed,
    "noise-gain": noise_gain,
    "gpu-none": lambda: gpu_cell("none"),
    "gpu-auto": lambda: gpu_cell("auto"),
    "gpu-ratio": lambda: gpu_cell("ratio", ".2f"),
    "gpu-sampled-ratio": lambda: gpu_cell("ratio", ".2f", "temperature 0.7"),
    "gpu-queued-ratio": lambda: gpu_cell("ratio", ".2f", size=64),
}
TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    **cpu_tables.TABLES,
    "bench": bench,
    "gpu-speed": gpu_speed,
    "gpu-steps": gpu_steps,
    "gpu-products": gpu_products,
    "gpu-cells": gpu_cells,
    "gpu-serve": gpu_serve,
    "gpu-sampled": gpu_sampled,
    "gpu-attention": gpu_attention,
    "gpu-exactness": gpu_exactness,
    "lookahead-suites": lookahead_suites,
    "lookahead-ablation": lookahead_ablation,
    "lookahead-sampling": lookahead_sampling,
    "lookahead-scaling": lookahead_scaling,
    "pain-grid": pain_grid,
    "pain-trie": pain_trie,
    "ranks": lambda: ranks_table(read("scaling")),
    "fleet": lambda: fleet_table(read("scaling")),
}


def scaling_plot() -> str:
    """Draw tokens per step over the rows, and the fitted law for the same windows."""
    rows = of("lookahead", "scaling")
    (fitted,) = of("lookahead", "law")
    alpha, f = fitted["alpha"], fitted["f"]
    ngrams = list(dict.fromkeys(row["ngram"] for row in rows))
    of_each = [[row for row in rows if row["ngram"] == ngram] for ngram in ngrams]
    measured = {
        f"N = {ngram}": [(row["rows_per_step"], row["tokens_per_step"]) for row in mine]
        for ngram, mine in zip(ngrams, of_each, strict=True)
    }
    by_law = [[(row["rows_per_step"], law(alpha, f, row["ngram"], row["window"])) for row in mine] for mine in of_each]
    title = f"Lookahead on MT-bench; dashed: the law with α = {alpha:.3f}, f = {f:.2f}"
    return plots.lines(title, measured, Axes("rows of a step", "tokens per step", log=True, base=1.0), dashed=by_law)


def grid_plot() -> str:
    rows = of("pain", "grid")
    branches = dict.fromkeys(row["branch_length"] for row in rows)
    lines = {
        f"branch length {branch}": [
            (float(row["decoding_length"]), row["tokens_per_step"]) for row in rows if row["branch_length"] == branch
        ]
        for branch in branches
    }
    return plots.lines("Trie on GSM8K", lines, Axes("decoding length", "tokens per step", log=True, base=1.0))


def budget_plot() -> str:
    """Draw the tokens per second of a step by its rows: accepted tokens over the measured time."""
    milliseconds = {int(rows): compiled for rows, (*_, compiled) in cpu_tables.report("cpu_rows")["step"].items()}
    cells = [cell for cell in cpu_tables.report("tokens_per_step")["cells"] if cell["strategy"] == "auto"]
    tokens = {1: 1.0}
    for rows in sorted({cell["budget"] for cell in cells}):
        tokens[rows] = cpu_tables.mean([cell for cell in cells if cell["budget"] == rows], "tokens_per_step")
    speed = [(float(rows), 1e3 * found / milliseconds[rows]) for rows, found in tokens.items()]
    title = "Tokens per step ÷ milliseconds of a step (demo model, two CPU cores)"
    return plots.lines(title, {"tokens per second": speed}, Axes("rows of a step", "tokens per second", log=True))


PLOTS: dict[str, Callable[[], str]] = {
    "scaling.svg": scaling_plot,
    "grid.svg": grid_plot,
    "speed.svg": lambda: speed_ups(bench_lines()),
    "budget.svg": budget_plot,
    "arriving.svg": lambda: picture.draw(picture.read()),
}


def rendered(page: str) -> str:
    """Return a page with all of its tables and figures replaced."""

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}"

    page = re.sub(r"(<!-- table: ([\w-]+) -->)\n.*?(<!-- end -->)", fill, page, flags=re.DOTALL)
    value = r"(<!-- value: ([\w-]+) -->)[^\n]*?(<!-- end -->)"
    return re.sub(value, lambda found: found[1] + VALUES[found[2]]() + found[3], page)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    for name, draw in PLOTS.items():
        (DOCS / "img" / name).write_text(draw() + "\n")


if __name__ == "__main__":
    main()
