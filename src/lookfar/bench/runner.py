"""Every contestant on every prompt, in turn, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import platform
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import transformers

from lookfar.bench.contestants import BASELINES, Contestant
from lookfar.bench.records import Results, Run
from lookfar.bench.suites import Prompt
from lookfar.config import Budget, StrategySpec, name_of, parse_strategy
from lookfar.errors import ConfigError, RequestError
from lookfar.progress import bar
from lookfar.version import __version__

if TYPE_CHECKING:
    from lookfar.lm import LM

SAVE_EVERY = 5.0  # seconds


def contestants_for(
    lm: LM, strategies: Seq[StrategySpec], baselines: Seq[str], draft: Any, budget: Budget, batches: Seq[int]
) -> list[Contestant]:
    """Baselines first, then our own plain decoding, then the strategies."""
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
    made = [Contestant(f"hf {name}", arguments=arguments[name]) for name in baselines]
    ours = [parse_strategy(spec) for spec in strategies]
    for strategy in [(), *(s for s in ours if s)]:
        made.append(Contestant(name_of(strategy), strategy, budget if strategy else None))
    names = [one.name for one in made]
    if len(set(names)) < len(names):
        raise ConfigError(f"Each contestant can be named once, not {', '.join(names)}.")
    return made


def run_all(
    lm: LM,
    suites: dict[str, list[Prompt]],
    contestants: Seq[Contestant],
    *,
    max_new_tokens: int,
    batches: Seq[int],
    repeats: int,
    sampling: dict[str, Any],
    settings: dict[str, Any],
    out: Path | None = None,
) -> Results:
    """Measure what is not in the file yet."""
    results = Results(settings, machine_of(lm))
    if out is not None and out.exists():
        results = Results.load(out)
        if results.settings != settings:
            changed = next(k for k in settings if results.settings.get(k) != settings[k])
            raise ConfigError(f"{out} was measured with another {changed}: give another file, or delete it.")
    done = {run.key: run for run in results.runs}
    calls = [
        (suite, batch, repeat, start)
        for suite, prompts in suites.items()
        for batch in batches
        for repeat in range(repeats)
        for start in range(0, len(prompts), batch)
    ]
    saved = perf_counter()
    warm: set[tuple[str, int]] = set()
    with bar("Measuring", len(calls) * len(contestants)) as advance:
        try:
            for number, (suite, batch, repeat, start) in enumerate(calls):
                group = suites[suite][start : start + batch]
                ids = [prompt.ids(lm) for prompt in group]
                names = [prompt.id for prompt in group]
                if start == 0:
                    for one in contestants:
                        one.forget(lm)
                turn = number % len(contestants)
                for one in [*contestants[turn:], *contestants[:turn]]:
                    key = suite, tuple(names), one.name, batch, repeat
                    if key in done:
                        remind(one, ids, done[key])
                    else:
                        if (one.name, batch) not in warm:
                            warm_up(lm, one, ids, max_new_tokens, sampling)
                            warm.add((one.name, batch))
                        found = one.run(lm, ids, max_new_tokens, start, sampling)
                        results.runs.append(replace(found, suite=suite, prompts=names, batch=batch, repeat=repeat))
                    advance(1)
                if out is not None and perf_counter() - saved > SAVE_EVERY:
                    results.save(out)
                    saved = perf_counter()
        finally:
            curve = lm.engine.costs
            if curve is not None:
                results.costs = {str(int(n)): float(s) for n, s in zip(curve.rows, curve.seconds, strict=True)}
            if out is not None and results.runs:
                results.save(out)
    return results


def warm_up(lm: LM, one: Contestant, ids: list[list[int]], new: int, sampling: dict[str, Any]) -> None:
    """The first passes of a process are slow, and captured steps are made when they are first needed."""
    keep, one.memory = one.memory, None
    one.forget(lm)
    try:
        one.run(lm, ids, new if lm.engine.steps.room.packed else min(8, new), 0, sampling)
    except RequestError as error:
        raise ConfigError(f"{one.name} cannot run here: {error}") from error
    one.memory = keep


def remind(one: Contestant, ids: list[list[int]], run: Run) -> None:
    """What was decoded before an interruption is known again, as text; predictions are not."""
    if one.memory is not None and one.strategy:
        for prompt, output in zip(ids, run.outputs, strict=True):
            one.memory.store.add([*prompt[-64:], *output])


def machine_of(lm: LM) -> dict[str, Any]:
    on_gpu = lm.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(lm.device) if on_gpu else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "steps": lm.engine.steps.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lookfar": __version__,
    }
