"""Strategies as frozen values: what to guess with, checked when made, and how a name becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lookfar.errors import ConfigError

if TYPE_CHECKING:
    from lookfar.drafters.base import Drafter
    from lookfar.memory import Memory
    from lookfar.sequence import Request


@dataclass(frozen=True)
class Strategy:
    """One source of guesses: its settings, and how its drafters for one request are made."""

    name: ClassVar[str] = ""
    rides: ClassVar[bool] = False  # does it need rows that are not guesses?

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        """The drafters of one request."""
        raise NotImplementedError

    @property
    def max_rows(self) -> int:
        """The most rows this strategy adds to one step, beside the root."""
        raise NotImplementedError


def _one_of(owner: Strategy, **allowed: tuple[str, ...]) -> None:
    for key, values in allowed.items():
        if getattr(owner, key) not in values:
            raise ConfigError(f"{owner.name}: {key} must be one of {', '.join(values)}, not {getattr(owner, key)!r}.")


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

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        from lookfar.drafters.jacobi import JacobiDrafter

        return [JacobiDrafter(self, request.prompt)]

    @property
    def max_rows(self) -> int:
        return self.block


@dataclass(frozen=True)
class Lookahead(Strategy):
    """Lookahead Decoding (Fu et al. 2024): window W, n-gram size N, at most G guesses a step.

    `from_prompt` also fills the pool with the n-grams of the prompt and of the text as it grows.
    """

    name: ClassVar[str] = "lookahead"
    rides: ClassVar[bool] = True
    window: int = 15
    ngram: int = 5
    guesses: int = 15
    from_prompt: bool = True

    def __post_init__(self) -> None:
        _at_least(self, window=1, ngram=2, guesses=0)
        if not isinstance(self.from_prompt, bool):
            raise ConfigError(f"lookahead: from_prompt must be true or false, not {self.from_prompt!r}.")

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        from lookfar.drafters.lookahead import LookaheadDrafter

        return [LookaheadDrafter(self, request.prompt)]

    @property
    def max_rows(self) -> int:
        # Step t of the warm-up has t levels above the first; step N−2 is the full window.
        levels = range(self.ngram - 1)
        width = self.window + self.ngram - 2
        return max(width - t - 1 + t * (width - t) for t in levels) + self.guesses * (self.ngram - 1)


@dataclass(frozen=True)
class Suffix(Strategy):
    """Where the text's last tokens stood before, in this request and in the store, and what followed there.

    Up to `branches` places in each, `length` tokens on, at most `rows` guesses a step.
    """

    name: ClassVar[str] = "suffix"
    branches: int = 16
    length: int = 24
    rows: int = 64

    def __post_init__(self) -> None:
        _at_least(self, branches=1, length=1, rows=1)
        if self.branches > 64:
            raise ConfigError(f"suffix: branches must be at most 64, not {self.branches}.")

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        from lookfar.drafters.suffix import StoreDrafter, SuffixDrafter

        stored = StoreDrafter(self, memory.store, len(request.prompt), request.remember)
        return [SuffixDrafter(self, request.length + 1), stored]

    @property
    def max_rows(self) -> int:
        return self.rows


@dataclass(frozen=True)
class Recycle(Strategy):
    """What the model last predicted after each token and pair of tokens, and the root's runners-up."""

    name: ClassVar[str] = "recycle"
    rows: int = 64

    def __post_init__(self) -> None:
        _at_least(self, rows=1)

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        from lookfar.drafters.recycle import RecycleDrafter

        return [RecycleDrafter(memory.successors)]

    @property
    def max_rows(self) -> int:
        return self.rows


@dataclass(frozen=True)
class Trie(Strategy):
    """Lookahead / PAIN (Zhao et al. 2024): branches of the prompt and of all outputs, the most frequent first.

    `decoding_length` is the most rows, `branch_length` the deepest guess, `match` the longest suffix looked up. A token
    in `stop_words` is no key on its own.
    """

    name: ClassVar[str] = "trie"
    decoding_length: int = 63
    branch_length: int = 12
    match: int = 4
    shape: str = "hierarchical"
    source: str = "mixed"
    prompt_weight: float = 2.0
    stop_words: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _at_least(self, decoding_length=1, branch_length=1, match=1)
        _one_of(self, shape=("hierarchical", "parallel", "single"), source=("mixed", "prompt", "output"))
        if not self.prompt_weight > 0:
            raise ConfigError(f"trie: prompt_weight must be above 0, not {self.prompt_weight!r}.")
        if self.match > self.branch_length:
            raise ConfigError(f"trie: match must be at most branch_length ({self.branch_length}), not {self.match}.")

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        from lookfar.drafters.trie import TrieDrafter

        return [TrieDrafter(self, memory.store, request.prompt, request.remember)]

    @property
    def max_rows(self) -> int:
        return self.decoding_length


@dataclass(frozen=True)
class PromptLookup(Strategy):
    """As in transformers: what followed the first place with the same last tokens, at most `length` of it."""

    name: ClassVar[str] = "prompt_lookup"
    length: int = 10
    ngram: int = 2

    def __post_init__(self) -> None:
        _at_least(self, length=1, ngram=1)

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        from lookfar.drafters.prompt_lookup import PromptLookupDrafter

        return [PromptLookupDrafter(self)]

    @property
    def max_rows(self) -> int:
        return self.length


@dataclass(frozen=True)
class DraftModel(Strategy):
    """A smaller `model` of the same family, loaded or by path or hub name, guesses `length` tokens."""

    name: ClassVar[str] = "draft_model"
    model: Any = None
    length: int = 4

    def __post_init__(self) -> None:
        _at_least(self, length=1)
        if self.model is None:
            raise ConfigError("draft_model: give the smaller model, as in DraftModel(model=...) or --set model=PATH.")

    def start(self, request: Request, memory: Memory) -> list[Drafter]:
        from lookfar.drafters.draft_model import ModelDrafter, bind

        return [ModelDrafter(self, bind(self.model, memory), request.length)]

    @property
    def max_rows(self) -> int:
        return self.length


STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (Suffix, Recycle, Trie, Lookahead, Jacobi, PromptLookup, DraftModel)
}
NAMES = ("auto", "none", *STRATEGIES)
AUTO: tuple[Strategy, ...] = (Suffix(), Recycle())  # the sources that pay, as docs/benchmarks.md shows

Budget = int | Literal["auto"] | None
AUTO_ROWS = 64  # the most rows that an automatic budget gives one sequence


def name_of(strategies: tuple[Strategy, ...]) -> str:
    """What a user would have asked for."""
    if strategies == AUTO:
        return "auto"
    return "+".join(strategy.name for strategy in strategies) or "none"


def default_budget(strategies: tuple[Strategy, ...]) -> Budget:
    """Automatic where all automatic sources are at work; strategies chosen by hand feed what they propose."""
    return "auto" if set(AUTO) <= set(strategies) else None


def check_budget(budget: Any) -> None:
    """Refuse what is no budget."""
    whole = isinstance(budget, int) and not isinstance(budget, bool) and 1 <= budget <= 512
    if budget not in (None, "auto") and not whole:
        raise ConfigError(f"budget must be auto or a number of rows from 1 to 512, not {budget!r}.")


StrategySpec = str | Strategy | Iterable[str | Strategy] | None


def parse_strategy(spec: StrategySpec, settings: Mapping[str, str] | None = None) -> tuple[Strategy, ...]:
    """Turn a name, names joined by `+`, objects or a list of them into strategies; `()` is plain decoding.

    `settings` are `key=value` texts as the command line takes them: `window=7`, or `lookahead.window=7`
    where two strategies share a key.
    """
    parts = list(spec) if isinstance(spec, Iterable) and not isinstance(spec, str) else [spec or "none"]
    wanted: list[Strategy | type[Strategy]] = []
    for part in parts:
        if isinstance(part, Strategy):
            wanted.append(part)
        elif isinstance(part, str):
            for name in part.split("+"):
                wanted += _named(name.strip())
        else:
            raise ConfigError(
                f"strategy takes a name ({', '.join(NAMES)}), names joined by +, or strategy objects, not {part!r}."
            )
    names = [strategy.name for strategy in wanted]
    if len(set(names)) < len(names):
        raise ConfigError(f"Each strategy can be named once, not {'+'.join(names)}.")
    return _apply_settings(wanted, settings or {})


def _named(name: str) -> Seq[Strategy | type[Strategy]]:
    if name in ("auto", "none"):
        return AUTO if name == "auto" else ()
    if name not in STRATEGIES:
        raise ConfigError(f"Unknown strategy {name!r}: use one of {', '.join(NAMES)}, or several joined by +.")
    return (STRATEGIES[name],)


def _apply_settings(wanted: Seq[Strategy | type[Strategy]], settings: Mapping[str, str]) -> tuple[Strategy, ...]:
    changes: list[dict[str, Any]] = [{} for _ in wanted]
    for key, text in settings.items():
        owner, _, field = key.rpartition(".")
        hits = [
            i
            for i, strategy in enumerate(wanted)
            if owner in ("", strategy.name) and field in {f.name for f in fields(strategy)}
        ]
        if not hits:
            allowed = [f"{s.name}.{f.name}" for s in wanted for f in fields(s)]
            raise ConfigError(f"Unknown setting {key!r}: this strategy takes {', '.join(allowed) or 'no settings'}.")
        for i in hits:
            changes[i][field] = _read(text)
    return tuple(
        strategy(**change) if isinstance(strategy, type) else replace(strategy, **change)
        for strategy, change in zip(wanted, changes, strict=True)
    )


def _read(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if "," in text:
        return tuple(_read(part) for part in text.split(",") if part)
    return text
