"""The experiments of Lookahead Decoding (Fu et al. 2024) with this implementation.

    python benchmarks/paper/lookahead.py --data DIR --out docs/results && python benchmarks/tables.py

Speed-up by suite; the ablation (prompt n-grams, window, guesses); sampling at T = 0 and 1; tokens per step for windows
W and n-gram lengths N, and the fit of the paper's law: with γ = N − 1 and b = W speculations,
E = (γ + 1) − Σ (1 − αⁱ)ᵇ over i = 1 … γ, and S = (f − 1 + E) ÷ f.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import Experiments
from law import fit

from lookfar import Lookahead, PromptLookup

WINDOWS, NGRAMS = (1, 2, 4, 7, 15, 30), (3, 4, 5)


def suites(found: Experiments) -> None:
    for strategy in ("none", Lookahead(15, 5, 15)):  # compiles and captures before anything is timed
        found.lm.generate(found.prompts("mt_bench")[0].ids(found.lm), max_new_tokens=32, strategy=strategy)
    for suite in ("mt_bench", "gsm8k", "humaneval", "mbpp"):
        baseline = found.measure("suites", suite, "none", method="none")
        ours = found.measure("suites", suite, Lookahead(15, 5, 15), method="lookahead 5/15/15")
        ours["speed_up"] = ours["tokens_per_second"] / baseline["tokens_per_second"]


def ablation(found: Experiments) -> None:
    found.measure("ablation", "mt_bench", "none", method="none")
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
        for method, strategy in (("none", "none"), ("lookahead 5/15/15", Lookahead(15, 5, 15))):
            found.measure("sampling", "mt_bench", strategy, method=method, temperature=temperature, top_k=0)


def scaling(found: Experiments) -> None:
    found.measure("scaling", "mt_bench", "none", method="none")
    points = []
    for ngram in NGRAMS:
        for window in WINDOWS:
            strategy = Lookahead(window, ngram, window, from_prompt=False)
            row = found.measure("scaling", "mt_bench", strategy, ngram=ngram, window=window)
            points.append((ngram, window, row["tokens_per_step"]))
    alpha, f, error = fit(points)
    found.rows.append({"section": "law", "alpha": alpha, "f": f, "root_mean_square_error": error})
    print(f"α = {alpha:.3f}, f = {f:.2f}, error {error:.3f}")


if __name__ == "__main__":
    sections = {"suites": suites, "ablation": ablation, "sampling": sampling, "scaling": scaling}
    Experiments(__doc__, sections).run("lookahead")
