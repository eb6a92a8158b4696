"""Strategies by name, by object and by setting; every mistake says what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

import lookfar
from lookfar.drafters.jacobi import Jacobi
from lookfar.drafters.lookahead import Lookahead
from lookfar.drafters.registry import auto_strategies, name_of, parse_strategy
from lookfar.speculation.row_budget import default_budget


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", ()),
        (None, ()),
        ("jacobi", (Jacobi(),)),
        ("lookahead", (Lookahead(15, 5, 15, True),)),
        ("jacobi+lookahead", (Jacobi(), Lookahead())),
        (" lookahead + jacobi ", (Lookahead(), Jacobi())),
        ("none+jacobi", (Jacobi(),)),
        (Lookahead(window=7), (Lookahead(window=7),)),
        ([Lookahead(window=7), "jacobi"], (Lookahead(window=7), Jacobi())),
        ([], ()),
    ],
)
def test_specs(spec: Any, expected: Any) -> None:
    assert parse_strategy(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lookahed", "Unknown strategy 'lookahed': use one of auto, none, suffix"),
        ("lookahead+", "Unknown strategy ''"),
        ("jacobi+jacobi", "named once"),
        (7, "strategy takes a name"),
        ([7], "strategy takes a name"),
    ],
)
def test_bad_specs(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_strategy(spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lookahead(ngram=1), "ngram must be a whole number of at least 2, not 1"),
        (lambda: Lookahead(window=0), "window must be a whole number of at least 1, not 0"),
        (lambda: Lookahead(guesses=-1), "guesses must be a whole number of at least 0, not -1"),
        (lambda: Lookahead(window=2.5), "window must be a whole number"),  # type: ignore[arg-type]
        (lambda: Lookahead(window=True), "window must be a whole number"),
        (lambda: Lookahead(from_prompt="yes"), "from_prompt must be true or false"),  # type: ignore[arg-type]
        (lambda: Jacobi(block=0), "block must be a whole number of at least 1, not 0"),
    ],
)
def test_values_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert isinstance(caught.value, lookfar.LookfarError)


def test_settings() -> None:
    settings = {"window": "7", "lookahead.from_prompt": "false", "block": "3"}
    assert parse_strategy("lookahead+jacobi", settings) == (Lookahead(window=7, from_prompt=False), Jacobi(block=3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windw": "7"}, "Unknown setting 'windw': this strategy takes lookahead.window, lookahead.ngram"),
        ({"jacobi.block": "7"}, "Unknown setting 'jacobi.block'"),
        ({"window": "many"}, "window must be a whole number of at least 1, not 'many'"),
    ],
)
def test_bad_settings(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_strategy("lookahead", settings)


def test_no_speculation_takes_no_settings() -> None:
    with pytest.raises(ValueError, match="takes no settings"):
        parse_strategy("none", {"window": "7"})


def test_automatic_means_its_sources_and_an_automatic_budget() -> None:
    assert parse_strategy("auto") == auto_strategies()
    assert default_budget(auto_strategies()) == "auto"
    assert [name_of(parse_strategy(n)) for n in ("auto", "none", "trie+jacobi")] == ["auto", "none", "trie+jacobi"]
    assert default_budget(parse_strategy("auto+lookahead")) == "auto"
    assert default_budget(parse_strategy("lookahead")) is None
