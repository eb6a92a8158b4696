"""Which settings are fastest for this model, this machine and these prompts? Tried, not guessed.

Candidates run on the same prompts in turn; after each round the slower half is out. What is left is compared with the
defaults on prompts that were kept aside, and only what is faster there is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lookfar.bench.contestants import Contestant
from lookfar.config import AUTO, STRATEGIES, Budget, Lookahead, Strategy, Suffix, Trie, name_of
from lookfar.costs import machine_and_model
from lookfar.demo import cache_dir
from lookfar.errors import ConfigError
from lookfar.files import change_json, read_json

if TYPE_CHECKING:
    from lookfar.answers import Steps
    from lookfar.lm import LM

WORTH = 1.02  # a candidate must be this much faster than the defaults to replace them
FORMAT = "lookfar profile 1"


@dataclass
class Candidate:
    """Settings, and how fast they were."""

    strategies: tuple[Strategy, ...]
    budget: Budget
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0

    @property
    def name(self) -> str:
        rows = f", {self.budget} rows" if isinstance(self.budget, int) else ""
        return (name_of(self.strategies) if self.strategies == AUTO else told(self.strategies)) + rows

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Profile:
    """What `load` uses when nothing else is asked for."""

    strategies: tuple[Strategy, ...]
    budget: Budget
    speed_up: float  # over the defaults, on prompts kept aside
    over_plain: float
    tried: list[tuple[str, float, int]] = field(default_factory=list)  # name, tokens per second, rounds


def told(strategies: Seq[Strategy]) -> str:
    """Strategies with the settings that are not their defaults: trie(decoding_length=7)."""
    words = []
    for one in strategies:
        usual = type(one)()
        changed = [
            f"{f.name}={getattr(one, f.name)}" for f in fields(one) if getattr(one, f.name) != getattr(usual, f.name)
        ]
        words.append(one.name + (f"({', '.join(changed)})" if changed else ""))
    return " + ".join(words) or "none"


def candidates(limit: int | None) -> list[Candidate]:
    """The defaults first, then plain decoding, then what else might be faster."""
    rows = [n for n in (4, 8, 16, 32, 64) if limit is None or n <= limit]
    made = [Candidate(AUTO, "auto"), Candidate((), None)]
    made += [Candidate(AUTO, n) for n in rows]
    made += [Candidate((Suffix(),), n) for n in rows[1:3]]
    made += [Candidate((Trie(decoding_length=n - 1, branch_length=b),), n) for n in rows[1:4] for b in (8, 12)]
    windows = [(3, 4, 3), (5, 5, 5), (7, 5, 7), (15, 5, 15)]
    made += [Candidate((Lookahead(w, n, g),), None) for w, n, g in windows]
    return [one for one in made if limit is None or sum(s.max_rows for s in one.strategies if s.rides) < limit]


def tune(
    lm: LM,
    prompts: Seq[list[int]],
    *,
    minutes: float = 10.0,
    max_new_tokens: int = 128,
    say: Callable[[str], None] = lambda _: None,
    among: Seq[Candidate] | None = None,
) -> Profile:
    """Find the fastest settings within a time limit."""
    if len(prompts) < 2:
        raise ConfigError("Tuning needs two prompts at least: some are kept aside to judge by.")
    if not minutes > 0:
        raise ConfigError(f"minutes must be above 0, not {minutes!r}.")
    deadline = perf_counter() + 60 * minutes
    aside, practice = list(prompts[::3]), [p for i, p in enumerate(prompts) if i % 3]
    left = list(among if among is not None else candidates(lm.engine.steps.room.rows))
    every = list(left)
    contestants = {id(one): Contestant(one.name, one.strategies, one.budget) for one in left}
    for contestant in contestants.values():
        contestant.forget(lm)
        contestant.run(lm, [practice[0]], 4, 0, {})  # the first passes are slow
        contestant.forget(lm)
    number = 0
    while len(left) > 1 and perf_counter() < deadline - 0.35 * 60 * minutes:
        prompt = practice[number % len(practice)]
        number += 1
        for one in left:
            _try(lm, one, contestants[id(one)], prompt, max_new_tokens)
            if perf_counter() > deadline - 0.3 * 60 * minutes:
                break
        slowest = sorted((one for one in left if one.rounds), key=lambda one: one.rate, reverse=True)
        left = slowest[: max((len(slowest) + 1) // 2, 1)] if number > 1 or len(left) <= 4 else left
        say(f"after {number} prompts: {left[0].name}, {left[0].rate:.1f} tokens/s, leads of {len(left)}")
    best = max((one for one in every if one.rounds), key=lambda one: one.rate)
    return _judge(lm, best, every, aside, max_new_tokens, deadline, say)


def _try(lm: LM, one: Candidate, contestant: Contestant, prompt: list[int], new: int) -> None:
    run = contestant.run(lm, [prompt], new, 0, {})
    one.tokens += run.tokens
    one.seconds += run.seconds
    one.rounds += 1


def _judge(
    lm: LM,
    best: Candidate,
    every: Seq[Candidate],
    aside: Seq[list[int]],
    new: int,
    deadline: float,
    say: Callable[[str], None],
) -> Profile:
    """The winner, the defaults and plain decoding on prompts that none of them has seen."""
    sides: dict[str, tuple[tuple[Strategy, ...], Budget]] = {
        "best": (best.strategies, best.budget),
        "defaults": (AUTO, "auto"),
        "plain": ((), None),
    }
    made = {name: Candidate(*how) for name, how in sides.items()}
    running = {name: Contestant(name, one.strategies, one.budget) for name, one in made.items()}
    for contestant in running.values():
        contestant.forget(lm)
    for number, prompt in enumerate(aside):
        if number and perf_counter() > deadline:
            break
        for name, one in made.items():
            _try(lm, one, running[name], prompt, new)
    gain = made["best"].rate / made["defaults"].rate
    chosen = best if gain >= WORTH else Candidate(AUTO, "auto")
    speed_up = gain if gain >= WORTH else 1.0
    plain = max(made["best" if gain >= WORTH else "defaults"].rate / made["plain"].rate, 0.0)
    if plain < 1.0:
        chosen, speed_up, plain = Candidate((), None), made["plain"].rate / made["defaults"].rate, 1.0
    say(f"on prompts kept aside: {chosen.name}, {speed_up:.2f}× the defaults, {plain:.2f}× plain decoding")
    tried = sorted(((one.name, one.rate, one.rounds) for one in every if one.rounds), key=lambda row: -row[1])
    return Profile(chosen.strategies, chosen.budget, speed_up, plain, tried)


def save_profile(steps: Steps, profile: Profile, path: Path | None = None) -> Path:
    """Keep a profile where `load` finds it."""
    path = path or profiles_file()
    record = {
        "strategies": [{"name": one.name} | vars(one) for one in profile.strategies],
        "budget": profile.budget,
        "speed_up": profile.speed_up,
        "over_plain": profile.over_plain,
    }

    def add(found: Any) -> dict[str, Any]:
        return {"format": FORMAT, "profiles": _profiles(found) | {machine_and_model(steps): record}}

    try:
        change_json(path, add)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def find_profile(steps: Steps, path: Path | None = None) -> Profile | None:
    """What was tuned for this model on this machine; None if nothing was, or it cannot be read."""
    found = _profiles(read_json(path or profiles_file())).get(machine_and_model(steps))
    try:
        if found is None:
            return None
        strategies = []
        for item in found["strategies"]:
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in item.items() if key != "name"}
            strategies.append(STRATEGIES[item["name"]](**values))
        return Profile(tuple(strategies), found["budget"], float(found["speed_up"]), float(found["over_plain"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def profiles_file() -> Path:
    return cache_dir() / "profiles.json"


def _profiles(found: Any) -> dict[str, Any]:
    """Those of a file's contents, none if it is not ours."""
    try:
        return dict(found["profiles"]) if found["format"] == FORMAT else {}
    except (ValueError, KeyError, TypeError):
        return {}
