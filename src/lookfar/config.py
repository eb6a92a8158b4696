"""Strategies as frozen values: what to guess with, checked when made, and how a name becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lookfar.errors import ConfigError

if TYPE_CHECKING:
    from lookfar.drafters.base import Drafter


@dataclass(frozen=True)
class Strategy:
    """One source of guesses: its settings, and how its drafter for one request is made."""

    name: ClassVar[str] = ""

    def start(self, prompt: list[int]) -> Drafter:
        """The drafter of one request."""
        raise NotImplementedError

    @property
    def max_rows(self) -> int:
        """The most rows this strategy adds to one step, beside the root."""
        raise NotImplementedError


def _at_least(owner: Strategy, **minima: int) -> None:
    for key, minimum in minima.items():
        value = getattr(owner, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{owner.name}: {key} must be a whole number of at least {minimum}, not {value!r}.")


@dataclass(frozen=True)
class Jacobi(Strategy):
    """Plain Jacobi iteration: `block` guessed tokens in a row, each step replaced by the model's own answers."""

    name: ClassVar[str] = "jacobi"
    block: int = 8

    def __post_init__(self) -> None:
        _at_least(self, block=1)

    def start(self, prompt: list[int]) -> Drafter:
        from lookfar.drafters.jacobi import JacobiDrafter

        return JacobiDrafter(self, prompt)

    @property
    def max_rows(self) -> int:
        return self.block


@dataclass(frozen=True)
class Lookahead(Strategy):
    """Lookahead Decoding (Fu et al. 2024): window W, n-gram size N, at most G guesses a step.

    `from_prompt` also fills the pool with the n-grams of the prompt and of the text as it grows.
    """

    name: ClassVar[str] = "lookahead"
    window: int = 15
    ngram: int = 5
    guesses: int = 15
    from_prompt: bool = True

    def __post_init__(self) -> None:
        _at_least(self, window=1, ngram=2, guesses=0)
        if not isinstance(self.from_prompt, bool):
            raise ConfigError(f"lookahead: from_prompt must be true or false, not {self.from_prompt!r}.")

    def start(self, prompt: list[int]) -> Drafter:
        from lookfar.drafters.lookahead import LookaheadDrafter

        return LookaheadDrafter(self, prompt)

    @property
    def max_rows(self) -> int:
        # Step t of the warm-up has t levels above the first; step N−2 is the full window.
        levels = range(self.ngram - 1)
        width = self.window + self.ngram - 2
        return max(width - t - 1 + t * (width - t) for t in levels) + self.guesses * (self.ngram - 1)


STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (Jacobi, Lookahead)}
NAMES = ("none", *STRATEGIES)


def default_strategy(device_type: str) -> tuple[Strategy, ...]:
    """Lookahead as its authors advise; on a CPU, where every row costs, with few rows."""
    few_rows = Lookahead(window=2, ngram=4, guesses=3)
    return (few_rows if device_type == "cpu" else Lookahead(),)


StrategySpec = str | Strategy | Iterable[str | Strategy] | None


def parse_strategy(spec: StrategySpec, settings: Mapping[str, str] | None = None) -> tuple[Strategy, ...]:
    """Turn a name, names joined by `+`, objects or a list of them into strategies; `()` is plain decoding.

    `settings` are `key=value` texts as the command line takes them: `window=7`, or `lookahead.window=7`
    where two strategies share a key.
    """
    parts = list(spec) if isinstance(spec, Iterable) and not isinstance(spec, str) else [spec or "none"]
    strategies: list[Strategy] = []
    for part in parts:
        if isinstance(part, Strategy):
            strategies.append(part)
        elif isinstance(part, str):
            strategies += [_named(name.strip()) for name in part.split("+") if name.strip() != "none"]
        else:
            raise ConfigError(
                f"strategy takes a name ({', '.join(NAMES)}), names joined by +, or strategy objects, not {part!r}."
            )
    names = [strategy.name for strategy in strategies]
    if len(set(names)) < len(names):
        raise ConfigError(f"Each strategy can be named once, not {'+'.join(names)}.")
    return tuple(_apply_settings(strategies, settings or {}))


def _named(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise ConfigError(f"Unknown strategy {name!r}: use one of {', '.join(NAMES)}, or several joined by +.")
    return STRATEGIES[name]()


def _apply_settings(strategies: list[Strategy], settings: Mapping[str, str]) -> list[Strategy]:
    for key, text in settings.items():
        owner, _, field = key.rpartition(".")
        hits = [
            i
            for i, strategy in enumerate(strategies)
            if owner in ("", strategy.name) and field in {f.name for f in fields(strategy)}
        ]
        if not hits:
            allowed = [f"{s.name}.{f.name}" for s in strategies for f in fields(s)]
            raise ConfigError(f"Unknown setting {key!r}: this strategy takes {', '.join(allowed) or 'no settings'}.")
        for i in hits:
            strategies[i] = replace(strategies[i], **{field: _read(text)})
    return strategies


def _read(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text
