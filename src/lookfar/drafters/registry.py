"""Strategies by name: the built-in ones, those of other packages, and how a specification becomes strategies.

Another package registers a strategy with an entry point in the group `lookfar.drafters`, or with `register`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from lookfar.drafters.base import Strategy
from lookfar.errors import ConfigError, first_sentence

if TYPE_CHECKING:
    from lookfar.models.binding import BoundModel

GROUP = "lookfar.drafters"
# Looked up when first used, so that a name does not import every drafter.
BUILTIN = {
    "suffix": "Suffix",
    "recycle": "Recycle",
    "trie": "Trie",
    "lookahead": "Lookahead",
    "jacobi": "Jacobi",
    "prompt_lookup": "PromptLookup",
    "draft_model": "DraftModel",
    "mtp": "Mtp",
}
RESERVED = ("auto", "none")

StrategySpec = str | Strategy | Iterable[str | Strategy] | None
StrategyClass = TypeVar("StrategyClass", bound=type[Strategy])
_registered: dict[str, type[Strategy]] = {}


@cache
def auto_strategies() -> tuple[Strategy, ...]:
    """Return the strategies of `auto`; docs/benchmarks.md compares them with the others."""
    return strategy_class("suffix")(), strategy_class("recycle")()


def for_model(strategies: tuple[Strategy, ...], model: BoundModel) -> tuple[Strategy, ...]:
    """Return the strategies for a model: `auto` also drafts with the prediction layers of its checkpoint."""
    is_auto = all(strategy in strategies for strategy in auto_strategies())
    if not is_auto or any(strategy.name == "mtp" for strategy in strategies):
        return strategies
    return (*strategies, strategy_class("mtp")(if_pays=True)) if model.has_heads else strategies  # type: ignore[call-arg]


def register(strategy: StrategyClass) -> StrategyClass:
    """Make a strategy known by its `name`; also usable as a class decorator."""
    _check_class(strategy, getattr(strategy, "__name__", repr(strategy)))
    name = strategy.name
    if not name.isidentifier():
        raise ConfigError(f"A strategy's name is a word like my_drafter, not {name!r}.")
    if name in (*RESERVED, *BUILTIN):
        raise ConfigError(f"{name} is the name of a built-in strategy: choose another one.")
    _registered[name] = strategy
    return strategy


def strategy_names() -> tuple[str, ...]:
    """Return every name that a specification may hold."""
    return tuple(dict.fromkeys([*RESERVED, *BUILTIN, *_registered, *_entry_points()]))


def strategy_class(name: str) -> type[Strategy]:
    """Return the strategy of a name."""
    if name in BUILTIN:
        found: type[Strategy] = getattr(import_module(f"lookfar.drafters.{name}"), BUILTIN[name])
        return found
    if name in _registered:
        return _registered[name]
    if name in _entry_points():
        return _load(_entry_points()[name])
    raise ConfigError(f"Unknown strategy {name!r}: use one of {', '.join(strategy_names())}, or several joined by +.")


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in (*RESERVED, *BUILTIN)}


def _load(point: EntryPoint) -> type[Strategy]:
    try:
        found = point.load()
    except Exception as error:  # code of another package
        raise ConfigError(f"The strategy {point.name} ({point.value}) fails: {first_sentence(error)}.") from error
    _check_class(found, point.value)
    strategy: type[Strategy] = found
    return strategy


def _check_class(strategy: Any, where: str) -> None:
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise ConfigError(f"{where} is not a subclass of lookfar.Strategy: register the class of the settings.")


def name_of(strategies: tuple[Strategy, ...]) -> str:
    """Return the specification of some strategies, without their settings."""
    if strategies == auto_strategies():
        return "auto"
    return "+".join(strategy.name for strategy in strategies) or "none"


def describe(strategies: Seq[Strategy]) -> str:
    """Return strategies with the settings that differ from their defaults: `trie(decoding_length=7)`."""
    words = []
    for strategy in strategies:
        changed = [
            f"{f.name}={getattr(strategy, f.name)}" for f in fields(strategy) if getattr(strategy, f.name) != f.default
        ]
        words.append(strategy.name + (f"({', '.join(changed)})" if changed else ""))
    return " + ".join(words) or "none"


def parse_strategy(spec: StrategySpec, settings: Mapping[str, str] | None = None) -> tuple[Strategy, ...]:
    """Turn a name, names joined by `+`, objects or a list of them into strategies; `()` is decoding without drafts.

    `settings` are `key=value` texts as the command line takes them: `window=7`, or `lookahead.window=7` where two
    strategies share a key.
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
            names = ", ".join(strategy_names())
            raise ConfigError(f"strategy takes a name ({names}), names joined by +, or strategy objects, not {part!r}.")
    names_given = [strategy.name for strategy in wanted]
    if len(set(names_given)) < len(names_given):
        raise ConfigError(f"Each strategy can be named once, not {'+'.join(names_given)}.")
    return _apply_settings(wanted, settings or {})


def _named(name: str) -> Seq[Strategy | type[Strategy]]:
    if name in RESERVED:
        return auto_strategies() if name == "auto" else ()
    return (strategy_class(name),)


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
            changes[i][field] = _parse_value(text)
    return tuple(
        strategy(**change) if isinstance(strategy, type) else replace(strategy, **change)
        for strategy, change in zip(wanted, changes, strict=True)
    )


def _parse_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if "," in text:
        return tuple(_parse_value(part) for part in text.split(",") if part)
    return text
