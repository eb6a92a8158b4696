"""Requests that cannot fit are refused with a sentence, before memory is asked for."""

from __future__ import annotations

import pytest

import lookfar
from families import tiny_model
from lookfar import LM
from lookfar.drafters.jacobi import Jacobi
from lookfar.drafters.recycle import Recycle
from lookfar.drafters.suffix import Suffix
from lookfar.drafters.trie import Trie
from lookfar.errors import ConfigError


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(tiny_model("llama"))


@pytest.mark.parametrize(
    "strategy",
    [
        lookfar.Lookahead(window=60_000),
        lookfar.Lookahead(ngram=60_000),
        lookfar.Lookahead(guesses=60_000),
        Suffix(rows=60_000),
        Recycle(rows=60_000),
        Trie(decoding_length=60_000),
        Jacobi(block=60_000),
    ],
    ids=lambda s: s.name,
)
def test_steps_that_do_not_fit_into_memory(lm: LM, strategy: lookfar.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.engine.limits._free_host_memory", lambda: 8 << 30)
    with pytest.raises(ConfigError, match="GiB are free: give the strategy smaller settings"):
        lm.generate([1, 2, 3], max_new_tokens=3, strategy=strategy)


def test_large_settings_that_fit(lm: LM) -> None:
    expected = lm.generate([1, 2, 3], max_new_tokens=9, strategy="none").token_ids
    for strategy in (lookfar.Lookahead(window=300), Suffix(length=65_536), Trie(branch_length=65_536, match=65_536)):
        assert lm.generate([1, 2, 3], max_new_tokens=9, strategy=strategy).token_ids == expected


def test_settings_beyond_all_use_are_refused_where_they_are_made() -> None:
    for setting in ("window", "ngram", "guesses"):
        with pytest.raises(ConfigError, match=f"lookahead: {setting} must be at most 65536"):
            lookfar.Lookahead(**{setting: 10**12})
