"""A laboratory for drafting: what was proposed by which source, with what estimate, and what was right.

    python benchmarks/draft_lab.py --data DIR --limit 24 --budgets 8,16,64,128 --memo FOLDER

Decodes prompts with the engine, one at a time, and looks at every step: tokens per step over all and over natural
outputs, the log loss and the reliability of the estimates, the host's time, and why drafts ended where they did.
Prompts with an even number are for development, the others are held out: choose by the first, report the second.
`session` keeps the draft state from prompt to prompt, `cold` clears it before each. `continued` goes on after a session
over the prompts of the other split, and `file` does so in a new draft state that loads that session's store file.

Output is exact, so the rows of a prompt are the same for every variant: with `--memo FOLDER` they are computed once and
kept there (see row_memo.py). Prints a table and one JSON line; `--plot FILE` draws the reliability of the estimates.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import torch
from prompts import parse_arguments, read_prompts
from rich.console import Console
from rich.table import Table
from row_memo import MemoRunner, RowMemo

import lookfar
from lookfar.bench.plots import Axes, lines
from lookfar.engine.stats import Stats, add_up, is_natural
from lookfar.speculation.candidates import COUNT, FIRST, TOKEN
from lookfar.speculation.draft_state import DraftState
from lookfar.speculation.drafting import DraftedGroup

BINS = 20
SPLITS = {"dev": 0, "held out": 1}
MODES = ("session", "cold", "continued", "file")


@dataclass
class Findings:
    """What the steps of some prompts have shown."""

    misses: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)  # verified draft tokens by top source
    accepted: Counter[str] = field(default_factory=Counter)
    loss: float = 0.0  # of the estimates of all candidates after accepted tokens, in nats
    candidates: int = 0
    decisions: int = 0  # tokens that candidates were built for
    # Estimates of candidates and of verified paths: their sum, their number, and how many came true, by bin.
    single: np.ndarray = field(default_factory=lambda: np.zeros((3, BINS)))
    paths: np.ndarray = field(default_factory=lambda: np.zeros((3, BINS)))

    def see(self, group: DraftedGroup, tokens: Seq[int], nodes: Seq[int]) -> None:
        """Look at a step of one request before anything is learned from it."""
        tree, candidates = group.trees.split()[group.members[0].place], group.candidates
        table, scores = candidates.nodes, candidates.scores
        for node in range(len(tree)):
            self.sources[tree.source(node)] += 1
        for node in nodes:
            self.accepted[tree.source(node)] += 1
        gains = group.acceptance.calibration.apply(tree.scores)
        right = np.isin(np.arange(len(tree)), nodes)
        count_estimates(self.paths, gains, right)
        self.misses[self.reason(tree, tokens, nodes, table)] += 1
        at = 0
        for token in tokens:
            first, count = int(table[at, FIRST]), int(table[at, COUNT])
            if first < 0 or not count:
                break
            self.decisions += 1
            chances = np.clip(scores[first : first + count] / max(float(scores[at]), 1e-30), 1e-6, 1 - 1e-6)
            hits = table[first : first + count, TOKEN] == token
            self.loss -= float(np.log(np.where(hits, chances, 1 - chances)).sum())
            self.candidates += count
            count_estimates(self.single, chances, hits)
            if not hits.any():
                break
            at = first + int(np.argmax(hits))

    def reason(self, tree: Any, tokens: Seq[int], nodes: Seq[int], table: Any) -> str:
        """Return why the last emitted token was not drafted."""
        at = 0
        for token in tokens[:-1]:
            first, count = int(table[at, FIRST]), int(table[at, COUNT])
            at = first + int(np.argmax(table[first : first + count, TOKEN] == token))
        first, count = int(table[at, FIRST]), int(table[at, COUNT])
        if first < 0:
            return "too deep"
        depth = len(tokens)
        elsewhere = bool(((tree.tokens == tokens[-1]) & (tree.depths == depth)).any())
        if (table[first : first + count, TOKEN] == tokens[-1]).any():
            return "ranked out, under another branch" if elsewhere else "ranked out"
        return "in no source, under another branch" if elsewhere else "in no source"


def count_estimates(bins: np.ndarray, estimates: np.ndarray, right: np.ndarray) -> None:
    where = np.minimum((estimates * BINS).astype(int), BINS - 1)
    for row, values in enumerate((estimates, np.ones(len(where)), right)):
        bins[row] += np.bincount(where, values, BINS)


@contextmanager
def watched(findings: Findings) -> Iterator[None]:
    """Show every step of the engine to `findings`."""
    learn = DraftedGroup.learn

    def look_and_learn(group: DraftedGroup, walks: Seq[Any]) -> None:
        walk = walks[group.members[0].place]
        if walk is not None:
            findings.see(group, walk.tokens, walk.nodes)
        learn(group, walks)

    DraftedGroup.learn = look_and_learn  # type: ignore[method-assign]
    try:
        yield
    finally:
        DraftedGroup.learn = learn  # type: ignore[method-assign]


@dataclass
class Lab:
    """The model, its memo, and how to decode."""

    lm: lookfar.LM
    options: argparse.Namespace

    def prompts(self, suite: str, split: str) -> list[tuple[int, list[int]]]:
        prompts = list(enumerate(read_prompts(self.lm, self.options.data / f"{suite}.jsonl", self.options.limit)))
        return prompts[SPLITS[split] :: 2]

    def running_text(self) -> list[int]:
        (state,) = self.lm.engine.scheduler.running.values()
        return state.ids

    def new_state(self) -> DraftState:
        return DraftState(self.lm.engine.runner.model.vocab_size)

    def run(self, suite: str, split: str, mode: str, budget: int) -> dict[str, Any]:
        """Decode the prompts of one suite and split."""
        lm, findings = self.lm, Findings()
        stats: list[Stats] = []
        natural: list[bool] = []
        lm.draft_state = self.new_state()
        if mode in ("continued", "file"):
            (other,) = set(SPLITS) - {split}
            for seed, prompt in self.prompts(suite, other):
                self.decode(seed, prompt, budget)
        if mode == "file":
            with TemporaryDirectory() as folder:
                lm.store.save(Path(folder) / "lab.store")
                lm.draft_state = self.new_state()
                lm.store.load(Path(folder) / "lab.store")
        with watched(findings):
            for seed, prompt in self.prompts(suite, split):
                if mode == "cold":
                    lm.draft_state = self.new_state()
                done = self.decode(seed, prompt, budget)
                stats.append(done.stats)
                natural.append(is_natural(done.token_ids))
        return self.summary((suite, split, mode, budget), stats, natural, findings)

    def decode(self, seed: int, prompt: list[int], budget: int) -> lookfar.Completion:
        """Decode one prompt."""
        options, runner = self.options, self.lm.engine.runner
        if isinstance(runner, MemoRunner):
            runner.salt = crc32(f"{seed} {options.sampling}".encode()) if options.sampling else 0
        return self.lm.generate(
            prompt,
            max_new_tokens=options.max_new_tokens,
            strategy=options.strategy,
            budget=budget,
            seed=seed,
            **parse_arguments(options.sampling),
        )

    def summary(
        self, cell: tuple[str, str, str, int], stats: Seq[Stats], natural: Seq[bool], findings: Findings
    ) -> dict[str, Any]:
        total = add_up(stats)
        without_loops = add_up(one for one, is_one in zip(stats, natural, strict=True) if is_one)
        ended = sum(findings.misses.values())
        return {
            **dict(zip(("suite", "split", "mode", "budget"), cell, strict=True)),
            "prompts": len(stats),
            "natural": sum(natural),
            "tokens_per_step": total.tokens_per_step,
            "tokens_per_step_natural": without_loops.tokens_per_step,
            "rows_per_step": total.rows_per_step,
            "host_microseconds": 1e6 * total.host_seconds / max(total.steps, 1),
            "log_loss": findings.loss / max(findings.decisions, 1),
            "candidates": findings.candidates / max(findings.decisions, 1),
            "misses": {name: count / ended for name, count in findings.misses.most_common()},
            "verified": dict(findings.sources),
            "accepted": dict(findings.accepted),
            "single": findings.single.tolist(),
            "paths": findings.paths.tolist(),
        }


def show(cells: Seq[dict[str, Any]], suites: Seq[str]) -> None:
    """Print the mean over suites of every mode, split and budget."""
    title = "tokens per step, all / natural; log loss in nats per token"
    table = Table("rows", "prompts", "state", *suites, "mean", "log loss", "host µs", "no source", title=title)
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["budget"], cell["split"], cell["mode"]), []).append(cell)
    for (budget, split, mode), own in groups.items():
        both = [(cell["tokens_per_step"], cell["tokens_per_step_natural"]) for cell in own]
        means = [float(np.mean(column)) for column in zip(*both, strict=True)]
        unknown = np.mean([sum(v for k, v in cell["misses"].items() if k.startswith("in no")) for cell in own])
        table.add_row(
            str(budget),
            split,
            mode,
            *(f"{a:.2f} / {b:.2f}" for a, b in both),
            f"{means[0]:.3f} / {means[1]:.3f}",
            f"{np.mean([cell['log_loss'] for cell in own]):.3f}",
            f"{np.mean([cell['host_microseconds'] for cell in own]):.0f}",
            f"{unknown:.0%}",
        )
    Console(width=150).print(table)


def plot(cells: Seq[dict[str, Any]], path: Path) -> None:
    """Draw how often candidates and paths with an estimate came true."""
    series: dict[str, list[tuple[float, float]]] = {"exact": [(0.0, 0.0), (1.0, 1.0)]}
    for name, key in (("single tokens", "single"), ("paths, calibrated", "paths")):
        bins = sum(np.array(cell[key]) for cell in cells)
        series[name] = [(s / n, right / n) for s, n, right in bins.T.tolist() if n >= 20]
    axes = Axes("estimate", "came true")
    path.write_text(lines("Reliability of the estimates", series, axes), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suites", default="mt_bench,humaneval,gsm8k")
    parser.add_argument("--limit", type=int, default=24, help="prompts of each suite, both splits together")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budgets", default="8,16,64,128")
    parser.add_argument("--splits", default="dev,held out")
    parser.add_argument("--modes", default="session,cold", help=", ".join(MODES))
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--sampling", default="", metavar="KEY=VALUE,…", help="sample with these arguments")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--memo", type=Path, help="a folder for the results of rows")
    parser.add_argument("--prior", action="store_true", help="first complete the prior of the recycle table")
    parser.add_argument("--plot", type=Path, help="write the reliability plot to this SVG file")
    parser.add_argument("--stores", type=Path, help="a folder for the store file that each session ends with")
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args()
    lm = lookfar.load(options.model, dtype=options.dtype, device=options.device, max_batch=1)
    while options.prior and lm.driver.call(lm.engine.extend_prior):
        pass
    lm.driver.call(lm.engine.settle)
    lab, inner, cells = Lab(lm, options), lm.engine.runner, []
    for suite in options.suites.split(","):
        memo = RowMemo(options.memo / f"{suite}.npz") if options.memo else None
        if memo is not None:
            lm.engine.runner = MemoRunner(inner, memo, lab.running_text)  # type: ignore[assignment]
        for budget in sorted(map(int, options.budgets.split(",")), reverse=True):
            for split in options.splits.split(","):
                for mode in options.modes.split(","):
                    cells.append(lab.run(suite, split, mode, budget))
                    last = cells[-1]
                    print(suite, budget, split, mode, f"{last['tokens_per_step']:.3f}", file=sys.stderr, flush=True)
                    if memo is not None:
                        memo.save()
                    if options.stores:
                        lm.store.save(options.stores / f"{suite}-{budget}-{split}-{mode}.store")
    show(cells, options.suites.split(","))
    if options.plot:
        plot(cells, options.plot)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    record = {"machine": where, "limit": options.limit, "sampling": options.sampling, "cells": cells}
    if options.json:
        options.json.write_text(json.dumps(record))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
