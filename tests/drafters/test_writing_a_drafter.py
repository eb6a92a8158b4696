"""docs/writing-a-drafter.md: its code runs, and the contract that it states is checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import lookfar
from lookfar.drafters import registry
from lookfar.testing import check_strategy, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-drafter.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    yield
    registry._entry_points.cache_clear()


def test_the_drafter_of_the_page_is_about_30_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 36


@pytest.mark.slow
def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tiny model in place of the demo model; its output is the same with the drafter and without."""

    class Letters:
        eos_token_id = None
        name_or_path = "letters"
        is_fast = False

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Encoding", (), {"input_ids": [ord(letter) % 96 for letter in text]})()

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(chr(97 + i % 26) for i in ids)

    monkeypatch.setattr(lookfar, "load", lambda _: lookfar.LM(tiny_model(), Letters()), raising=False)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    assert "proposed=" in capsys.readouterr().out
    drafted = namespace["drafted"].stats.drafters["bigrams"]
    assert drafted.proposed > drafted.accepted >= 0


def test_an_entry_point_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other_package.py").write_text(BLOCKS[0].replace("@lookfar.register\n", ""))
    info = tmp_path / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lookfar.drafters]\nbigrams = other_package:Bigrams\nbroken = no_such_package:Nothing\n"
        "wrong = other_package:BigramDrafter\nsuffix = other_package:Bigrams\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    (found,) = registry.parse_strategy("bigrams", {"bigrams.length": "4"})
    assert (found.name, found.max_rows) == ("bigrams", 4)
    assert registry.name_of(registry.parse_strategy("suffix+bigrams")) == "suffix+bigrams"
    assert registry.strategy_class("suffix") is lookfar.Suffix  # built-in names cannot be taken
    assert {"bigrams", "broken", "wrong"} <= set(registry.strategy_names())
    with pytest.raises(lookfar.ConfigError, match=r"The strategy broken \(no_such_package:Nothing\) fails: No module"):
        registry.parse_strategy("broken")
    with pytest.raises(lookfar.ConfigError, match="not a subclass of lookfar.Strategy"):
        registry.parse_strategy("wrong")
    model = tiny_model()
    expected = lookfar.LM(model, strategy="none").generate([1, 2, 3, 1, 2], max_new_tokens=12).token_ids
    assert lookfar.LM(model, strategy="bigrams").generate([1, 2, 3, 1, 2], max_new_tokens=12).token_ids == expected


@dataclass(frozen=True)
class Broken(lookfar.Strategy):
    """A strategy that breaks the contract in the way that `fault` names."""

    name: ClassVar[str] = "broken"
    fault: str = ""
    kept: ClassVar[list[int]] = []

    def create(self, context: lookfar.DraftContext) -> list[lookfar.Drafter]:
        return [BrokenDrafter(self.fault, self.kept)] if self.fault != "no drafter" else []

    @property
    def max_rows(self) -> int:
        return 0 if self.fault == "no rows" else 4


class BrokenDrafter:
    name = "broken"
    wants_predictions = False

    def __init__(self, fault: str, kept: list[int]) -> None:
        self.fault, self.kept = fault, kept

    def propose(self, ids: Any, limit: int) -> lookfar.Proposal:
        if self.fault == "changes the text":
            ids.append(1)
        if self.fault == "keeps state":
            self.kept.append(int(ids[-1]))
            return lookfar.Proposal.of([[self.kept[-2] if len(self.kept) > 1 else 0]])
        if self.fault == "too deep":
            return lookfar.Proposal.of([[1] * (limit + 1)])
        if self.fault == "outside the vocabulary":
            return lookfar.Proposal.of([[96]])
        proposal = lookfar.Proposal.of([[1, 2]])
        if self.fault == "score":
            proposal.scores[0] = 16
        if self.fault == "weight":
            proposal.weights[0] = np.nan
        if self.fault == "type":
            proposal.drafts = proposal.drafts.astype(np.int64)  # type: ignore[assignment]
        return proposal

    def observe(self, ids: Any, outcome: lookfar.Outcome) -> None:
        if self.fault == "changes the text later":
            ids[0] = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    {
        "no drafter": "at least one drafter",
        "no rows": "max_rows is at least 1",
        "changes the text": "propose does not change the text",
        "changes the text later": "observe does not change the text",
        "too deep": "no draft is deeper than the limit",
        "outside the vocabulary": "in the vocabulary",
        "score": "scores go from 0 to 15",
        "weight": "weights are above 0",
        "type": "int32 array",
        "keeps state": "leaves nothing to later ones|do not depend on others",
    }.items(),
)
def test_a_broken_contract_is_named(fault: str, sentence: str) -> None:
    Broken.kept.clear()
    with pytest.raises(AssertionError, match=sentence):
        check_strategy(Broken(fault))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        lookfar.Suffix(),
        lookfar.Recycle(),
        lookfar.Trie(),
        lookfar.Lookahead(3, 3, 3),
        lookfar.Jacobi(4),
        lookfar.PromptLookup(),
        lookfar.DraftModel(model=tiny_model()),
    ],
    ids=lambda strategy: strategy.name,
)
def test_our_own_drafters_keep_the_contract(strategy: lookfar.Strategy) -> None:
    check_strategy(strategy)


def test_registering() -> None:
    @dataclass(frozen=True)
    class Mine(Broken):
        name: ClassVar[str] = "mine"

    assert lookfar.register(Mine) is Mine
    assert registry.parse_strategy("mine") == (Mine(),)
    assert "mine" in registry.strategy_names()
    with pytest.raises(lookfar.ConfigError, match="not a subclass"):
        lookfar.register(BrokenDrafter)  # type: ignore[type-var]
    for name, message in {"auto": "built-in", "suffix": "built-in", "two words": "is a word like"}.items():
        with pytest.raises(lookfar.ConfigError, match=message):
            lookfar.register(type("Other", (Mine,), {"name": name}))
