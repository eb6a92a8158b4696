"""`lookfar tune`: the fastest settings for a model, a machine and prompts.

Settings are tried on the same prompts in turn, and after each round the slower half is dropped. What is left is
compared with the defaults on prompts that were not used for choosing, and replaces them only if it is faster there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

from lookfar.bench.methods import Method
from lookfar.drafters.base import Strategy
from lookfar.drafters.lookahead import Lookahead
from lookfar.drafters.registry import auto_strategies, describe, name_of
from lookfar.drafters.suffix import Suffix
from lookfar.drafters.trie import Trie
from lookfar.errors import ConfigError
from lookfar.lm import LM
from lookfar.profiles import Profile
from lookfar.speculation.row_budget import Budget

MIN_GAIN = 1.02  # a candidate has to be this much faster than the defaults to replace them


class Candidate:
    """Settings, and how fast they were."""

    def __init__(self, strategies: tuple[Strategy, ...], budget: Budget, name: str = "") -> None:
        self.strategies = strategies
        self.budget = budget
        self.name = name or _name(strategies, budget)
        self.method = Method(self.name, strategies, budget)
        self.tokens = 0
        self.seconds = 0.0
        self.rounds = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def run(self, lm: LM, prompt: list[int], new: int) -> None:
        """Decode a prompt and add its time."""
        run = self.method.run(lm, [prompt], new, 0, {})
        self.tokens += run.tokens
        self.seconds += run.seconds
        self.rounds += 1


def _name(strategies: tuple[Strategy, ...], budget: Budget) -> str:
    name = name_of(strategies) if strategies == auto_strategies() else describe(strategies)
    return name + (f", {budget} rows" if isinstance(budget, int) else "")


def candidates(limit: int | None) -> list[Candidate]:
    """Return the defaults, decoding without speculation, and what else might be faster with at most `limit` rows."""
    auto = auto_strategies()
    rows = [n for n in (4, 8, 16, 32, 64) if limit is None or n <= limit]
    found = [Candidate(auto, "auto"), Candidate((), None)]
    found += [Candidate(auto, n) for n in rows]
    found += [Candidate((Suffix(),), n) for n in rows[1:3]]
    found += [Candidate((Trie(decoding_length=n - 1, branch_length=b),), n) for n in rows[1:4] for b in (8, 12)]
    windows = [(3, 4, 3), (5, 5, 5), (7, 5, 7), (15, 5, 15)]
    found += [Candidate((Lookahead(w, n, g),), None) for w, n, g in windows]
    return [one for one in found if limit is None or sum(s.max_rows for s in one.strategies if s.uses_window) < limit]


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
        raise ConfigError("Tuning needs two prompts at least: some are kept for the comparison with the defaults.")
    if not minutes > 0:
        raise ConfigError(f"minutes must be above 0, not {minutes!r}.")
    search = Search(lm, max_new_tokens, perf_counter() + 60 * minutes, say)
    every = list(among if among is not None else candidates(lm.engine.runner.limits.rows))
    best = search.halve(every, [p for i, p in enumerate(prompts) if i % 3], 0.35 * 60 * minutes)
    profile = search.compare(best, list(prompts[::3]))
    profile.tried = sorted(((one.name, one.rate, one.rounds) for one in every if one.rounds), key=lambda row: -row[1])
    return profile


@dataclass(frozen=True)
class Search:
    """A search for the fastest candidate, with a deadline."""

    lm: LM
    max_new_tokens: int
    deadline: float
    say: Callable[[str], None]

    def halve(self, every: Seq[Candidate], prompts: Seq[list[int]], reserve: float) -> Candidate:
        """Try candidates on prompts in turn, drop the slower half after each, and return the fastest.

        `reserve` are the seconds before the deadline that are left for `compare`.
        """
        for one in every:
            one.method.forget(self.lm)
            one.method.run(self.lm, [prompts[0]], 4, 0, {})  # the first passes are slow
            one.method.forget(self.lm)
        left, number = list(every), 0
        while len(left) > 1 and (number == 0 or perf_counter() < self.deadline - reserve):
            prompt = prompts[number % len(prompts)]
            number += 1
            for one in left:
                one.run(self.lm, prompt, self.max_new_tokens)
                if perf_counter() > self.deadline - 0.85 * reserve:
                    break
            ranked = sorted((one for one in left if one.rounds), key=lambda one: one.rate, reverse=True)
            left = ranked[: max((len(ranked) + 1) // 2, 1)] if number > 1 or len(left) <= 4 else left
            self.say(f"after {number} prompts: {left[0].name}, {left[0].rate:.1f} tokens/s, leads of {len(left)}")
        return max((one for one in every if one.rounds), key=lambda one: one.rate)

    def compare(self, best: Candidate, prompts: Seq[list[int]]) -> Profile:
        """Compare the fastest candidate with the defaults and with no speculation, on other prompts."""
        auto = auto_strategies()
        winner = Candidate(best.strategies, best.budget, "best")
        defaults, none = Candidate(auto, "auto", "defaults"), Candidate((), None, "none")
        for one in (winner, defaults, none):
            one.method.forget(self.lm)
        for number, prompt in enumerate(prompts):
            if number and perf_counter() > self.deadline:
                break
            for one in (winner, defaults, none):
                one.run(self.lm, prompt, self.max_new_tokens)
        gain = winner.rate / defaults.rate
        chosen, speed_up = (best, gain) if gain >= MIN_GAIN else (Candidate(auto, "auto"), 1.0)
        over_none = (winner if gain >= MIN_GAIN else defaults).rate / none.rate
        if over_none < 1.0:
            chosen, speed_up, over_none = Candidate((), None), none.rate / defaults.rate, 1.0
        self.say(f"on other prompts: {chosen.name}, {speed_up:.2f}× the defaults, {over_none:.2f}× no speculation")
        return Profile(chosen.strategies, chosen.budget, speed_up, over_none)
