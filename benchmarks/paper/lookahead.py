"""The experiments of Lookahead Decoding (Fu et al. 2024) with this implementation.

    python benchmarks/paper/lookahead.py --data DIR --out docs/img

Speed-up by suite; the ablation (prompt n-grams, window, guesses); sampling at T = 0 and 1; tokens per step for windows
W and n-gram lengths N, drawn over the rows of a step, and the fit of the paper's law: with γ = N − 1 and b = W
speculations, E = (γ + 1) − Σ (1 − αⁱ)ᵇ over i = 1 … γ, and S = (f − 1 + E) ÷ f.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import Experiments

from lookfar import Lookahead, PromptLookup
from lookfar.bench import plots

WINDOWS, NGRAMS = (1, 2, 4, 7, 15, 30), (3, 4, 5)


def suites(found: Experiments) -> None:
    for suite in ("mt_bench", "gsm8k", "humaneval", "mbpp"):
        plain = found.measure("suites", suite, "none", method="plain")
        ours = found.measure("suites", suite, Lookahead(15, 5, 15), method="lookahead 5/15/15")
        found.rows[-1]["speed_up"] = ours["tokens_per_second"] / plain["tokens_per_second"]


def ablation(found: Experiments) -> None:
    found.measure("ablation", "mt_bench", "none", method="plain")
    for name, strategy in {
        "prompt lookup alone": PromptLookup(length=4),
        "window, one guess": Lookahead(15, 5, 1, from_prompt=False),
        "window and guesses": Lookahead(15, 5, 15, from_prompt=False),
        "window, guesses and prompt n-grams": Lookahead(15, 5, 15),
        "small window, many guesses": Lookahead(5, 5, 30),
        "large window, few guesses": Lookahead(30, 5, 5),
    }.items():
        found.measure("ablation", "mt_bench", strategy, method=name)


def sampling(found: Experiments) -> None:
    for temperature in (0.7, 1.0):
        for method, strategy in (("plain", "none"), ("lookahead 5/15/15", Lookahead(15, 5, 15))):
            found.measure("sampling", "mt_bench", strategy, method=method, temperature=temperature, top_k=0)


def law(alpha: float, f: float, ngram: int, window: int) -> float:
    """Tokens per step by the paper's formula."""
    gamma = ngram - 1
    expected = (gamma + 1) - sum((1 - alpha**i) ** window for i in range(1, gamma + 1))
    return (f - 1 + expected) / f


def fit(points: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """α and f with the least squared error over (N, W, S), and that error's root mean."""
    best = (0.0, 1.0, np.inf)
    for alpha in np.arange(0.05, 0.95, 0.005):
        for f in np.arange(1.0, 12.0, 0.02):
            error = sum((law(alpha, f, n, w) - s) ** 2 for n, w, s in points) / len(points)
            if error < best[2]:
                best = float(alpha), float(f), float(error)
    return best[0], best[1], best[2] ** 0.5


def scaling(found: Experiments) -> None:
    found.measure("scaling", "mt_bench", "none", method="plain")
    points = []
    measured: dict[str, list[tuple[float, float]]] = {}
    for ngram in NGRAMS:
        for window in WINDOWS:
            strategy = Lookahead(window, ngram, window, from_prompt=False)
            row = found.measure("scaling", "mt_bench", strategy, ngram=ngram, window=window)
            points.append((ngram, window, row["tokens_per_step"]))
            measured.setdefault(f"N = {ngram}", []).append((row["rows_per_step"], row["tokens_per_step"]))
    alpha, f, error = fit(points)
    found.rows.append({"section": "law", "alpha": alpha, "f": f, "root_mean_square_error": error})
    print(f"α = {alpha:.3f}, f = {f:.2f}, error {error:.3f}")
    by_law = {
        f"law, {name}": [(rows, law(alpha, f, ngram, window)) for (rows, _), window in zip(line, WINDOWS, strict=True)]
        for (name, line), ngram in zip(measured.items(), NGRAMS, strict=True)
    }
    title = f"Tokens per step by rows, W = G of {', '.join(map(str, WINDOWS))}; α = {alpha:.2f}, f = {f:.2f}"
    found.plot("scaling", plots.lines(title, measured | by_law, "rows of a step", "S", log=True))


if __name__ == "__main__":
    sections = {"suites": suites, "ablation": ablation, "sampling": sampling, "scaling": scaling}
    Experiments(__doc__, sections).run("lookahead")
