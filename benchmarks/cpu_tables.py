"""Tables of the reports that `benchmarks/figures.py` keeps in docs/results; `tables.py` puts them into the pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence as Seq
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
SUITES = {
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "mbpp": "MBPP",
    "random": "random tokens, temperature 2",
}
LOOKAHEAD = {8: "N 3 W 1 G 2", 16: "N 4 W 2 G 3", 64: "N 5 W 8 G 8"}  # as in tokens_per_step.py
METHODS = {"lookfar none": "lookfar, no speculation", "lookfar auto": "**lookfar**"}


def read(name: str) -> Any:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def report(name: str) -> Any:
    """Return what a benchmark reported."""
    return read(name)["report"]


def table(headings: Seq[str], rows: Iterable[Seq[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def both(row: dict[str, Any], form: str = ".2f") -> str:
    return f"{row['tokens_per_step']:{form}} / {row['tokens_per_step_natural']:{form}}"


def mean(rows: Seq[dict[str, Any]], key: str) -> float:
    return float(sum(row[key] for row in rows)) / len(rows)


def means(rows: Seq[dict[str, Any]]) -> str:
    return f"{mean(rows, 'tokens_per_step'):.2f} / {mean(rows, 'tokens_per_step_natural'):.2f}"


def tokens_per_step() -> str:
    cells = report("tokens_per_step")["cells"]
    suites = list(dict.fromkeys(cell["suite"] for cell in cells))
    kinds = sorted(dict.fromkeys((cell["budget"], cell["strategy"]) for cell in cells), key=lambda kind: kind[0])

    def line(budget: int, strategy: str) -> list[str]:
        mine = [cell for cell in cells if (cell["budget"], cell["strategy"]) == (budget, strategy)]
        found = [both(next(cell for cell in mine if cell["suite"] == suite)) for suite in suites]
        numbers = [str(budget), named(strategy, budget), *found, means(mine)]
        bold = [numbers[0], *(f"**{word}**" for word in numbers[1:])] if strategy == "auto" else numbers
        return [*bold, f"{mean(mine, 'rows_per_step'):.1f}"]

    headings = [SUITES[suite] for suite in suites]
    headings[0] += ", all / natural"
    return table(("rows", "strategy", *headings, "mean", "rows used"), (line(*kind) for kind in kinds))


def named(strategy: str, budget: int) -> str:
    """Return a strategy with the settings that fit a budget."""
    settings = {
        "lookahead": f" {LOOKAHEAD.get(budget, '')}",
        "prompt_lookup": f" ({min(10, budget - 1)})",
        "jacobi": f" ({budget - 1})",
    }
    return strategy.replace("/fresh", ", fresh") + settings.get(strategy, "")


def sampling() -> str:
    lines = []
    for temperature, name in (("0", "sampling_0"), ("0.7", "sampling_07"), ("1.0", "sampling_1")):
        cells = report(name)["cells"]
        for budget in sorted({cell["budget"] for cell in cells}):
            ways = [
                [c for c in cells if c["budget"] == budget and c["strategy"] == s] for s in ("auto", "auto/no_noise")
            ]
            for word, mine in zip(("auto", "without noise"), ways, strict=True):
                if not mine:
                    continue
                gain = mean(ways[0], "tokens_per_step") / mean(ways[1], "tokens_per_step") - 1 if ways[1] else 0.0
                adds = f"{100 * gain:.0f} %" if gain and word == "auto" else ""
                lines.append([temperature, str(budget), word, *map(both, mine), means(mine), adds])
    headings = ("temperature", "rows", "", "MT-bench, all / natural", "HumanEval", "mean", "known noise adds")
    return table(headings, lines)


def dropin() -> str:
    rows = report("dropin")["rows"]
    sizes = list(dict.fromkeys(row["batch"] for row in rows))

    def line(setting: str) -> list[str]:
        mine = [row for row in rows if row["setting"] == setting]
        words = setting.replace(",", ", ").replace("=", " ")
        figures = [(f"{row['tokens_per_step']:.2f}", f"{row['speed_up_over_generate']:.2f}×") for row in mine]
        return [words, *(word for pair in figures for word in pair), identical(mine)]

    headings = [word for size in sizes for word in (f"batch {size}: tokens/step", "`generate` ÷ accelerated")]
    return table(("arguments", *headings, "identical"), map(line, dict.fromkeys(row["setting"] for row in rows)))


def identical(rows: Seq[dict[str, Any]]) -> str:
    return f"{sum(row['identical'] for row in rows)}/{sum(row['sequences'] for row in rows)}"


def structured() -> str:
    words = {"optional whitespace": "JSON's optional whitespace"}
    return table(
        ("schema", "tokens/step", "forced drafts accepted", "over `generate`", "over none", "identical"),
        (
            (
                words.get(row["schema"], row["schema"]),
                f"{row['tokens_per_step']:.2f}",
                row["accepted"],
                f"{row['over_generate']:.2f}×",
                f"{row['over_none']:.2f}×",
                row["identical"],
            )
            for row in report("structured")
        ),
    )


def warm_store() -> str:
    ways = ("cold", "warm", "in a row", "again")

    def line(suite: str) -> list[str]:
        found = report(f"warm_store_{suite}")
        cells = (f"{a:.1f} / {b:.1f}" if a >= 10 else f"{a:.2f} / {b:.2f}" for a, b in (found[way] for way in ways))
        return [f"{SUITES[suite]} ({found['stored_tokens']:,} tokens stored)", *cells]

    return table(("tokens per step, all / natural", "cold", "warm", "kept", "again"), map(line, ("gsm8k", "mbpp")))


def cpu_speed() -> str:
    lines = []
    for name, note in (("cpu_speed", ""), ("cpu_speed_random", ""), ("cpu_speed_fresh", ", fresh")):
        for suite, parts in report(name)["suites"].items():
            for which, row in parts.items():
                if which == "natural" and suite == "random":
                    continue
                lines.append(
                    (
                        f"{SUITES[suite]}{note}",
                        f"{which} {row['prompts']}",
                        f"{row['identical']}/{row['prompts']}",
                        *(f"{row[k]:.2f}×" for k in ("auto_over_generate", "auto_over_none", "none_over_generate")),
                        f"{row['tokens_per_step']:.2f}",
                        f"{row['rows_per_step']:.1f}",
                    )
                )
    headings = ("suite", "outputs", "identical", "`auto` ÷ `generate`", "`auto` ÷ none", "none ÷ `generate`")
    return table((*headings, "tokens/step", "rows/step"), lines)


def cpu_layers() -> str:
    found = report("cpu_rows")
    shapes = [found[shape] for shape in found if "×" in shape]
    names = {"packed for 1 row": "packed for one row", "packed for 8 rows": "packed for eight rows"}
    names |= {name: name for name in shapes[0]["1"] if name.startswith("compiled")}

    def line(rows: str) -> list[str]:
        return [rows, *(" · ".join(f"{of[rows][name]:.1f}" for of in shapes) for name in shapes[0][rows])]

    variants = [names.get(name, f"`{name}`") for name in next(iter(shapes[0].values()))]
    return table(("rows", *variants), map(line, shapes[0]))


def cpu_steps() -> str:
    steps = report("cpu_rows")["step"]
    ways = zip(
        ("torch", "torch, packed", "compiled, float32 weights", "compiled"),
        zip(*steps.values(), strict=True),
        strict=True,
    )
    return table(("rows", *steps), ([way, *(f"{ms:.0f}" for ms in found)] for way, found in ways))


def cpu_batches() -> str:
    found = report("cpu_rows")
    sizes = [name for name in found if name.startswith("batch ") and name != "batch 1"]

    def cell(size: str, rows: str, how: str) -> str:
        mine = found[size].get(rows)
        return f"{mine[f'torch, packed, {how}']:.0f} → {mine[f'compiled, {how}']:.0f}" if mine else ""

    headings = [word for size in sizes for word in (f"{size.removeprefix('batch ')} requests, even", "uneven")]
    lines = (
        [rows, *(cell(size, rows, how) for size in sizes for how in ("even", "uneven"))] for rows in found[sizes[0]]
    )
    return table(("rows in all", *headings), lines)


def host_steps() -> str:
    def line(row: dict[str, Any]) -> list[str]:
        kind = f"{row['requests']} × {row['budget']}" if row["budget"] else f"{row['requests']} × 1 (no speculation)"
        return [kind, f"{row['microseconds']:,.0f}"]

    return table(("requests × rows", "microseconds of the host"), map(line, report("host_cost")["steps"]))


def look_ups() -> str:
    return table(
        ("tokens learned", "suffix", "trie (63 rows, up to four suffix lengths)", "learning a token"),
        (
            (
                f"{row['tokens']:,}",
                f"{row['suffix_50']:.1f} / {row['suffix_99']:.1f}",
                f"{row['trie_50']:.3g} / {row['trie_99']:.3g}",
                f"{row['learn_microseconds_per_token']:.1f}",
            )
            for row in report("host_cost")["look_ups"]
        ),
    )


def starts() -> str:
    def line(row: dict[str, Any]) -> list[str]:
        seconds = [
            f"{row[key]:.1f}" if key in row else "" for key in ("loaded", "warmed_up", "first_token", "full_speed")
        ]
        requests = f"{row['first_request']:.1f} / {row['usual_request']:.1f}"
        return [row["cache"], "yes" if row["warmup"] else "no", *seconds, requests]

    headings = ("cache", "`warmup()`", "loaded", "warmed up", "first token", "full speed", "first / usual request")
    return table(headings, map(line, report("start")))


def exactness(name: str, title: str) -> str:
    found = report(name)
    batched = any("identical_in_batch" in row for row in found["strategies"].values())
    words = {"jacobi": "jacobi (block 8)"}

    def line(strategy: str, row: dict[str, Any]) -> list[str]:
        if strategy.startswith("lookahead"):
            settings = strategy.removeprefix("lookahead ").partition(" ")[0].split("/")
            strategy = "lookahead " + " ".join(f"{k} {v}" for k, v in zip("NWG", settings, strict=True))
            strategy += ", from_prompt" if "prompt" in row["name"] else ""
        return [
            words.get(strategy, strategy),
            f"{row['identical']}/{found['prompts']}",
            *([f"{row['identical_in_batch']}/{found['prompts']}"] if batched else []),
            both(row),
            f"{row['rows_per_step']:.1f}",
            f"{row['speed_up_over_generate']:.2f}×",
        ]

    headings = ["identical", *(["in batches of 8"] if batched else []), "tokens/step, all / natural", "rows/step"]
    rows = (line(strategy, row | {"name": strategy}) for strategy, row in found["strategies"].items())
    return table((f"{title} ({found['natural']} natural)", *headings, "speed-up over `generate`"), rows)


def side_by_side() -> str:
    suites = report("side_by_side")["suites"]

    def line(name: str) -> list[str]:
        rows = [suite[name] for suite in suites.values()]
        figures = (f"{row['tokens_per_second']:.1f} ({row['over_generate']:.2f}×)" for row in rows)
        same = f"{sum(row['identical'] for row in rows)}/{sum(row['outputs'] for row in rows)}"
        return [METHODS.get(name, f"`{name}`" if name == "model.generate" else name), *figures, same]

    headings = [SUITES[suite] for suite in suites]
    headings[0] = f"tokens/s: {headings[0]}"
    return table(("", *headings, "same text"), map(line, next(iter(suites.values()))))


def serve_compare() -> str:
    found = report("serve_compare")
    runs = found.get("runs") or [found["rows"]]
    names = {
        "transformers": "`transformers serve --continuous-batching`",
        "lookfar none": "`lookfar serve --strategy none`",
        "lookfar": "`lookfar serve`",
    }

    def line(number: int, row: dict[str, Any]) -> list[str]:
        def cell(key: str, unit: str = " s") -> str:
            return " / ".join(f"{run[number][key]:.3g}" for run in runs) + unit

        new = not number or runs[0][number - 1]["server"] != row["server"]
        name = names[row["server"]] if new else ""
        keys = ("first_token_p50", "gap_p50", "gap_p99")
        return [name, str(row["clients"]), cell("tokens_per_second", ""), *map(cell, keys)]

    headings = ("server", "clients", "tokens per second", "first token, median", "gap between two parts, p50", "p99")
    return table(headings, (line(number, row) for number, row in enumerate(runs[0])))


TABLES: dict[str, Callable[[], str]] = {
    "tokens-per-step": tokens_per_step,
    "sampling": sampling,
    "dropin": dropin,
    "structured": structured,
    "warm-store": warm_store,
    "cpu-speed": cpu_speed,
    "side-by-side": side_by_side,
    "serve-compare": serve_compare,
    "cpu-layers": cpu_layers,
    "cpu-steps": cpu_steps,
    "cpu-batches": cpu_batches,
    "host-steps": host_steps,
    "look-ups": look_ups,
    "starts": starts,
    "exactness": lambda: exactness("exactness", "MT-bench, first 20"),
    "exactness-code": lambda: exactness("exactness_code", "HumanEval, first 10, and GSM8K, first 10"),
}
