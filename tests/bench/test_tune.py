"""Settings are chosen by what was measured, and kept where `load` finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lookfar
from families import tiny_model
from lookfar.bench.methods import Method
from lookfar.bench.records import Run
from lookfar.bench.steps import FLAT, StepCosts, measure_steps, random_model, steps_page, weight_bytes
from lookfar.bench.tune import Candidate, candidates, tune
from lookfar.cli import app
from lookfar.drafters.jacobi import Jacobi
from lookfar.drafters.lookahead import Lookahead
from lookfar.drafters.registry import auto_strategies
from lookfar.drafters.suffix import Suffix
from lookfar.drafters.trie import Trie
from lookfar.errors import ConfigError
from lookfar.profiles import Profile, find_profile, save_profile

PROMPTS = [[3 + i, 4 + i, 5 + i] for i in range(9)]


@pytest.fixture
def lm() -> lookfar.LM:
    return lookfar.LM(tiny_model("llama", torch.float32), max_batch=1)


def pretend(
    monkeypatch: pytest.MonkeyPatch, rates: dict[Any, float], elsewhere: dict[Any, float] | None = None
) -> list[Any]:
    """Runs that take as long as is said, by strategies and budget; on prompts kept aside perhaps another time."""
    calls = []

    def run(self: Method, lm: Any, prompts: list[list[int]], new: int, *_: Any) -> Run:
        kept_aside = PROMPTS.index(prompts[0]) % 3 == 0
        rate = (elsewhere if kept_aside and elsewhere else rates)[self.strategy, self.budget]
        calls.append((self.name, kept_aside))
        return Run("", [], self.name, 1, 0, [[0] * new], new / rate, 0.0, [])

    monkeypatch.setattr(Method, "run", run)
    return calls


DEFAULTS, NO_SPECULATION, FAST, SLOW = (auto_strategies(), "auto"), ((), None), ((Suffix(),), 8), ((Jacobi(),), None)
EVERY = [Candidate(*how) for how in (DEFAULTS, NO_SPECULATION, FAST, SLOW)]


def fresh() -> list[Candidate]:
    return [Candidate(one.strategies, one.budget) for one in EVERY]


def test_the_fastest_wins_if_it_is_faster_on_prompts_kept_aside(
    lm: lookfar.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend(monkeypatch, {DEFAULTS: 20.0, NO_SPECULATION: 10.0, FAST: 30.0, SLOW: 5.0})
    said: list[str] = []
    found = tune(lm, PROMPTS, among=fresh(), say=said.append)
    assert (found.strategies, found.budget) == FAST
    assert found.speed_up == pytest.approx(1.5)
    assert found.over_none == pytest.approx(3.0)
    assert [row[1] for row in found.tried] == sorted((row[1] for row in found.tried), reverse=True)
    assert said
    tried = {name for name, aside in calls if not aside}
    assert len(tried) == 4
    assert {name for name, aside in calls if aside} == {"best", "defaults", "none"}  # prompts that were kept aside


def test_settings_slower_on_held_out_prompts_are_rejected(lm: lookfar.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {DEFAULTS: 20.0, NO_SPECULATION: 10.0, FAST: 30.0, SLOW: 5.0}
    pretend(monkeypatch, rates, rates | {FAST: 19.0})
    found = tune(lm, PROMPTS, among=fresh())
    assert (found.strategies, found.budget, found.speed_up) == (*DEFAULTS, 1.0)


def test_no_speculation_is_chosen_where_it_is_fastest(lm: lookfar.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {DEFAULTS: 8.0, NO_SPECULATION: 10.0, FAST: 9.0, SLOW: 5.0})
    found = tune(lm, PROMPTS, among=fresh())
    assert (found.strategies, found.budget) == NO_SPECULATION
    assert found.speed_up == pytest.approx(10 / 8)


def test_it_really_runs(lm: lookfar.LM) -> None:
    found = tune(lm, PROMPTS, minutes=0.05, max_new_tokens=6, among=fresh())
    assert found.tried
    assert found.over_none >= 1.0 or found.strategies == ()


def test_candidates_fit_a_step() -> None:
    assert candidates(None)[0].strategies == auto_strategies()
    assert any(isinstance(s, Lookahead) and s.window == 15 for one in candidates(None) for s in one.strategies)
    assert not any(isinstance(s, Lookahead) and s.window == 15 for one in candidates(64) for s in one.strategies)
    assert len({one.name for one in candidates(None)}) == len(candidates(None))
    assert Candidate((Trie(branch_length=8), Suffix()), 16).name == "trie(branch_length=8) + suffix, 16 rows"


def test_a_profile_is_found_again_and_nothing_else_is_believed(lm: lookfar.LM, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "profiles.json"
    assert find_profile(lm.engine.runner, path) is None
    for strategies, budget in (
        ((Trie(branch_length=8, stop_words=(1, 2)),), 16),
        ((), None),
        (auto_strategies(), "auto"),
    ):
        save_profile(lm.engine.runner, Profile(strategies, budget, 1.2, 1.5), path)
        found = find_profile(lm.engine.runner, path)
        assert found is not None
        assert (found.strategies, found.budget, found.speed_up) == (strategies, budget, 1.2)
    for text in ("{", "[]", '{"format": "other", "profiles": {}}'):
        path.write_text(text)
        assert find_profile(lm.engine.runner, path) is None
    with pytest.raises(ConfigError, match="cannot be written"):
        save_profile(lm.engine.runner, Profile((), None, 1.0, 1.0), Path("/proc/none/profiles.json"))


def test_load_uses_the_profile(tmp_path: Path) -> None:
    from helpers import byte_tokenizer

    tokenizer = byte_tokenizer()
    tiny_model("llama", torch.float32, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = lookfar.load(str(tmp_path), device="cpu")
    assert lm.strategy == auto_strategies()
    save_profile(lm.engine.runner, Profile((Suffix(length=5),), 7, 1.2, 1.5))
    tuned = lookfar.load(str(tmp_path), device="cpu")
    assert (tuned.strategy, tuned.budget) == ((Suffix(length=5),), 7)
    assert lookfar.load(str(tmp_path), device="cpu", strategy="none").strategy == ()
    assert lookfar.load(str(tmp_path), device="cpu", strategy="auto").strategy == auto_strategies()


def test_mistakes(lm: lookfar.LM) -> None:
    with pytest.raises(ConfigError, match="two prompts at least"):
        tune(lm, PROMPTS[:1])
    with pytest.raises(ConfigError, match="minutes must be above 0"):
        tune(lm, PROMPTS, minutes=0)
    for command, complaint in (
        (["tune"], "Give --prompts FILE or --suite NAMES"),
        (["bench", "steps"], "Give --model NAME or --shape NAME"),
        (["bench", "steps", "--shape", "x", "--contexts", "a"], "--contexts takes numbers"),
        (["bench", "steps", "--shape", "nothing-like-it"], "Unknown shape 'nothing-like-it'"),
    ):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, ConfigError), command
        assert complaint in str(result.exception)


@pytest.mark.slow
def test_the_cost_curve(lm: lookfar.LM) -> None:
    found = measure_steps(lm.engine.runner, "tiny", contexts=(16, 64), rows=(1, 4, 16))
    assert list(found.milliseconds) == [16, 64]
    assert all(list(curve) == [1, 4, 16] for curve in found.milliseconds.values())
    assert found.bandwidth > 1e8
    page = steps_page(found)
    assert "after 16 tokens" in page
    assert f"{found.milliseconds[64][4]:.2f}" in page
    assert "<svg" in page
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    record = found.as_dict()
    assert record["floor_milliseconds"] == pytest.approx(1e3 * found.weight_bytes / found.bandwidth)
    with pytest.raises(ConfigError, match="positions for 256 tokens only"):
        measure_steps(lm.engine.runner, "tiny", contexts=(4096,), rows=(1, 4))


def test_critical_rows_and_the_share_of_the_floor() -> None:
    curve = {1: 10.0, 2: 12.2, 4: 11.0, 8: 11.9, 16: 12.1, 32: 19.0}
    costs = StepCosts("m", "d", "s", {128: curve}, weight_bytes=4_000_000, bandwidth=1e9)
    assert costs.critical(128) == 8  # a single slow point before it changes nothing
    assert curve[8] <= FLAT * curve[1] < curve[16]
    assert costs.floor == pytest.approx(4.0)
    assert costs.share(128) == pytest.approx(0.4)


def test_weights_that_a_step_reads() -> None:
    tied = tiny_model("llama", torch.float32, tie_word_embeddings=True)
    loose = tiny_model("llama", torch.float32, tie_word_embeddings=False)
    assert weight_bytes(tied) == weight_bytes(loose)


def test_a_shape_from_a_config_file(tmp_path: Path) -> None:
    tiny_model("qwen2", torch.float32).config.save_pretrained(tmp_path)
    model = random_model(str(tmp_path / "config.json"), torch.device("cpu"), torch.float32)
    assert model.config.model_type == "qwen2"
    assert torch.get_default_dtype() == torch.float32
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not a config that transformers can read"):
        random_model(str(tmp_path / "config.json"), torch.device("cpu"), torch.float32)
