"""Run transformers' own generation tests with accelerated models, and compare the outcome with stock models.

    python tests/upstream/transformers_tests.py TREE [--families llama,gemma2] [--tests tests/generation]

TREE is a source tree of transformers, best of the installed version: the tests are not in its wheel. Every test runs
twice, in processes of its own: as it is, and with `generate` accelerating each model that it is called on. A test that
passes with stock models must pass with accelerated ones; others prove nothing and are only counted. The tests need
more packages than lookfar does: `pip install parameterized pytest-xdist datasets timeout-decorator`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FAMILIES = (
    "llama,mistral,qwen2,qwen3,gemma,gemma2,gemma3,phi3,gpt2,gpt_neox,bloom,opt,mixtral,cohere2,granite,qwen3_next,"
    "mamba,bart,t5,qwen2_vl"
)
PLUGIN = "transformers_tests"
OUTCOMES = "LOOKFAR_OUTCOMES"  # the file that the plugin writes
ACCELERATE = "LOOKFAR_ACCELERATE"  # set where models are to be accelerated


def accelerate_all_models() -> None:
    """Make `generate` of every model accelerate the model first."""
    from transformers import GenerationMixin

    import lookfar
    from lookfar.models.stock_loop import is_accelerated

    stock = GenerationMixin.generate

    def generate(self: Any, *arguments: Any, **named: Any) -> Any:
        if not is_accelerated(self):
            lookfar.accelerate(self, budget=16)  # drafts in every step, whatever the cost
        return stock(self, *arguments, **named)

    GenerationMixin.generate = generate


def pytest_configure(config: pytest.Config) -> None:
    config.outcomes = {}  # type: ignore[attr-defined]
    if os.environ.get(ACCELERATE):
        accelerate_all_models()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    outcomes = item.config.outcomes  # type: ignore[attr-defined]
    if report.when == "call" or report.outcome != "passed":
        outcomes[item.nodeid] = [report.outcome, str(report.longrepr)[-3000:] if report.failed else ""]


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcomes = session.config.outcomes  # type: ignore[attr-defined]
    Path(os.environ[OUTCOMES]).write_text(json.dumps(outcomes))


def run(tree: Path, places: list[str], choose: str, accelerated: bool) -> dict[str, list[str]]:
    """Return the outcome and the error of every test."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.json"
        environment = os.environ | {OUTCOMES: str(out), "PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1"}
        environment |= {ACCELERATE: "1"} if accelerated else {}
        command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "-k", choose, *places]
        done = subprocess.run(command, cwd=tree, env=environment, check=False, capture_output=True, text=True)
        found: dict[str, list[str]] = json.loads(out.read_text()) if out.exists() else {}
    if not found:
        print((done.stdout + done.stderr)[-2000:])
        sys.exit(f"No test of {', '.join(places)} ran: see above what transformers' tests need.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--families", default=FAMILIES, help="whose generation tests to run")
    parser.add_argument("--tests", default="tests/generation", help="further tests, or an empty text for none")
    parser.add_argument("-k", dest="choose", default="not slow", help="an expression that chooses among the tests")
    options = parser.parse_args()
    generation = (
        "generate or generation or decoding or beam or sample or padding or past_key_values or logits or stopping"
        " or streamer"
    )
    jobs = [(f"tests/models/{f}/test_modeling_{f}.py", generation) for f in options.families.split(",") if f]
    jobs += [(place, "test") for place in options.tests.split(",") if place]
    broken = 0
    for place, chosen in jobs:
        choose = f"({chosen}) and ({options.choose})"
        stock, ours = (run(options.tree, [place], choose, accelerated) for accelerated in (False, True))
        passed = [name for name, (outcome, _) in stock.items() if outcome == "passed"]
        worse = [name for name in passed if ours.get(name, ["missing", ""])[0] != "passed"]
        counts = dict(Counter(outcome for outcome, _ in stock.values()))
        print(f"{place}: stock {counts}, accelerated: {len(worse)} of {len(passed)} passed tests fail", flush=True)
        for name in worse:
            print(f"  {name}\n" + "\n".join(f"    {line}" for line in ours.get(name, ["", ""])[1].splitlines()[-25:]))
        broken += len(worse)
    sys.exit(f"{broken} tests pass with stock models only." if broken else None)


if __name__ == "__main__":
    main()
