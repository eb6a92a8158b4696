"""Runs every method on every prompt, in turn, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from lookfar.bench.methods import BASELINES, Method
from lookfar.bench.records import Results, Run
from lookfar.bench.suites import Prompt
from lookfar.core.progress import progress_bar
from lookfar.drafters.registry import StrategySpec, name_of, parse_strategy
from lookfar.errors import CapacityError, ConfigError, RequestError
from lookfar.lm import LM
from lookfar.speculation.row_budget import Budget
from lookfar.version import __version__

SAVE_SECONDS = 5.0  # between two saves of the records


def methods_for(
    strategies: Seq[StrategySpec], baselines: Seq[str], draft: Any, budget: Budget, batches: Seq[int]
) -> list[Method]:
    """Return the baselines, our own decoding without speculation, and the strategies."""
    if unknown := [name for name in baselines if name not in BASELINES]:
        raise ConfigError(f"Unknown baseline {unknown[0]!r}: use {', '.join(BASELINES)}.")
    if "assisted" in baselines and draft is None:
        raise ConfigError("assisted needs a draft model: give --draft MODEL.")
    if max(batches) > 1 and set(baselines) - {"generate"}:
        raise ConfigError(
            "transformers takes one prompt at a time for prompt lookup and assisted decoding: use batch 1."
        )
    arguments: dict[str, dict[str, Any]] = {
        "generate": {},
        "prompt_lookup": {"prompt_lookup_num_tokens": 10},
        "assisted": {"assistant_model": draft},
    }
    methods = [Method(f"hf {name}", arguments=arguments[name]) for name in baselines]
    ours = [parse_strategy(spec) for spec in strategies]
    for strategy in [(), *(s for s in ours if s)]:
        methods.append(Method(name_of(strategy), strategy, budget if strategy else None))
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ConfigError(f"Each method can be named once, not {', '.join(names)}.")
    return methods


@dataclass(frozen=True)
class Call:
    """Some neighbouring prompts of a suite that are decoded at once."""

    suite: str
    start: int  # the first of them
    batch: int
    repeat: int


@dataclass
class Benchmark:
    """The prompts, methods and settings of a benchmark; `run` measures or resumes it."""

    lm: LM
    suites: dict[str, list[Prompt]]
    methods: Seq[Method]
    max_new_tokens: int
    batches: Seq[int]
    repeats: int
    sampling: dict[str, Any]
    settings: dict[str, Any]  # have to be the same for a benchmark to be resumed
    out: Path | None = None
    _warm: set[tuple[str, int]] = field(default_factory=set)

    def run(self) -> Results:
        """Measure what is not in the file yet."""
        self._check_input()
        results = self._resume()
        done = {run.key: run for run in results.runs}
        saved = perf_counter()
        calls = list(self._calls())
        if len(done) < len(calls) * len(self.methods):
            self.lm.warmup(requests=max(self.batches), sampling=bool(self.sampling))
        with progress_bar("Measuring", len(calls) * len(self.methods)) as advance:
            try:
                for number, call in enumerate(calls):
                    turn = number % len(self.methods)
                    for method in [*self.methods[turn:], *self.methods[:turn]]:
                        self._run_method(method, call, done, results)
                        advance(1)
                    if self.out is not None and perf_counter() - saved > SAVE_SECONDS:
                        results.save(self.out)
                        saved = perf_counter()
            finally:
                curve = self.lm.engine.speculator.costs
                if curve is not None:
                    results.costs = {str(int(n)): float(s) for n, s in zip(curve.rows, curve.seconds, strict=True)}
                if self.out is not None and results.runs:
                    results.save(self.out)
        return results

    def _check_input(self) -> None:
        """Refuse sampling options without a meaning and prompts that are too long, before anything is measured."""
        self.lm.requests([0], max_new_tokens=1, **self.sampling)
        most = self.lm.engine.max_length
        if most is None:
            return
        for suite, prompts in self.suites.items():
            for prompt in prompts:
                length = len(prompt.ids(self.lm))
                if length + self.max_new_tokens > most:
                    raise CapacityError(
                        f"Prompt {prompt.id} of {suite} has {length} tokens, which do not fit in the model's {most} "
                        f"positions with {self.max_new_tokens} new ones: remove it, or generate fewer tokens."
                    )

    def _resume(self) -> Results:
        if self.out is None or not self.out.exists():
            return Results(self.settings, machine_of(self.lm))
        results = Results.load(self.out)
        if results.settings != self.settings:
            changed = next(k for k in self.settings if results.settings.get(k) != self.settings[k])
            then, now = (_words(settings.get(changed)) for settings in (results.settings, self.settings))
            raise ConfigError(
                f"{self.out} was measured with other {changed.replace('_', ' ')} ({then}, now {now}): "
                "give another file with --out, delete this one, or ask for the same."
            )
        return results

    def _calls(self) -> Iterator[Call]:
        for suite, prompts in self.suites.items():
            for batch in self.batches:
                for repeat in range(self.repeats):
                    for start in range(0, len(prompts), batch):
                        yield Call(suite, start, batch, repeat)

    def _run_method(self, method: Method, call: Call, done: dict[Any, Run], results: Results) -> None:
        prompts = self.suites[call.suite][call.start : call.start + call.batch]
        ids, names = [prompt.ids(self.lm) for prompt in prompts], [prompt.id for prompt in prompts]
        if call.start == 0:
            method.forget(self.lm)
        key = call.suite, tuple(names), method.name, call.batch, call.repeat
        if key in done:
            remember(method, ids, done[key])
            return
        if (method.name, call.batch) not in self._warm:
            self._warm_up(method, ids)
            self._warm.add((method.name, call.batch))
        run = method.run(self.lm, ids, self.max_new_tokens, call.start, self.sampling)
        results.runs.append(replace(run, suite=call.suite, prompts=names, batch=call.batch, repeat=call.repeat))

    def _warm_up(self, method: Method, ids: list[list[int]]) -> None:
        """Run a method once: the first passes of a process are slow, and graphs are captured on first use."""
        keep, new = method.state, self.max_new_tokens
        method.forget(self.lm)
        try:
            method.run(self.lm, ids, new if self.lm.engine.runner.limits.captured else min(8, new), 0, self.sampling)
        except RequestError as error:
            raise ConfigError(f"{method.name} cannot run here: {error}") from error
        method.state = keep


def remember(method: Method, ids: list[list[int]], run: Run) -> None:
    """Put outputs that were decoded before an interruption back into the draft store; predictions are lost."""
    if method.state is not None and method.strategy:
        for prompt, output in zip(ids, run.outputs, strict=True):
            method.state.store.add([*prompt[-64:], *output])


def machine_of(lm: LM) -> dict[str, Any]:
    """Return what the times depend on."""
    on_gpu = lm.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(lm.device) if on_gpu else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "runner": lm.engine.runner.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lookfar": __version__,
    }


def _words(setting: Any) -> str:
    """Return a setting in a few words."""
    words = ", ".join(map(str, setting)) if isinstance(setting, list | dict) else str(setting)
    return words if len(words) <= 60 else f"{words[:57]}…"
