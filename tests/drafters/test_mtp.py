"""Multi-token prediction: the drafts are those of transformers, and the tokens those of `generate`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, modeling_layers
from transformers.generation import candidate_generator

import lookfar
from families import DEVICE, tiny_model
from helpers import flat_lm, random_prompts, reference
from lookfar.drafters import mtp
from lookfar.drafters.base import MAX_SCORE, Proposal
from lookfar.drafters.mtp import DraftingValue, Mtp, MtpDrafter, as_proposal, score_of
from lookfar.drafters.registry import auto_strategies, for_model, parse_strategy
from lookfar.errors import ConfigError
from lookfar.lm import LM
from lookfar.models.binding import BoundModel
from lookfar.models.mtp_heads import MtpHeads, load_heads
from lookfar.speculation.controller import SpeculationController
from lookfar.speculation.cost_curve import CostCurve
from lookfar.testing import check_strategy
from mtp_checkpoints import LAYOUTS, RECURRENT_HEADS, load_saved, model_with_heads, needs_mtp, save_with_heads

PROMPTS = random_prompts(24, 33, 5)
NEW = 20
LENGTH = 3

pytestmark = needs_mtp


@pytest.fixture
def with_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns the model of a family with prediction layers."""
    return lambda family, **options: model_with_heads(family, tmp_path, monkeypatch, **options)


class Drafts:
    """The most likely path that was drafted after each text."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[int, ...], list[int]] = {}
        propose = MtpDrafter.propose

        def recorded(drafter: MtpDrafter, ids: Seq[int], limit: int) -> Proposal:
            proposal = propose(drafter, ids, limit)
            if len(proposal.drafts):
                self.found[tuple(ids)] = proposal.drafts[-drafter.settings.branches].tolist()
            return proposal

        patch.setattr(MtpDrafter, "propose", recorded)


def drafts_from_scratch(model: PreTrainedModel, heads: MtpHeads, ids: Seq[int]) -> list[int]:
    """The drafts of transformers' own forward pass over a whole text."""
    text = torch.tensor([ids], device=model.device)
    positions = torch.arange(1, len(ids), device=model.device)[None]
    with torch.no_grad():
        states = model.get_decoder()(text[:, :-1]).last_hidden_state
        found, _, _ = heads.model(text[:, 1:], states, None, positions, heads.new_cache())
    return found[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYOUTS)
def test_tokens_are_those_of_generate_and_drafts_those_of_a_fresh_pass(
    family: str, with_heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafts = with_heads(family), Drafts(monkeypatch)
    lm = LM(model, prefill_chunk=16)
    support = lm.engine.runner.model.support
    assert support.mode == ("chain" if family in RECURRENT_HEADS else "tree"), support.reason
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    layers = LAYOUTS[family][0]
    batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=Mtp(length=layers, branches=1))
    assert [one.token_ids for one in batch] == expected
    assert len(drafts.found) >= 3 * (NEW - 4)
    heads = lm.engine.runner.model.heads
    for ids, draft in list(drafts.found.items())[::3]:
        assert draft == drafts_from_scratch(model, heads, ids)[: len(draft)]
    branched = [lm.generate(prompt, max_new_tokens=NEW, strategy="mtp") for prompt in PROMPTS]
    mixed = lm.generate(PROMPTS, max_new_tokens=NEW, strategy="auto", budget=8)
    for done in (branched, mixed):
        assert [one.token_ids for one in done] == expected
        assert all("mtp" in one.stats.drafters for one in done)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_the_generator_of_transformers(
    family: str, with_heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafts = with_heads(family), Drafts(monkeypatch)
    own: dict[tuple[int, ...], list[int]] = {}
    generator: Any = candidate_generator.MTPCandidateGenerator
    get_candidates = generator.get_candidates

    def recorded(self: Any, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = get_candidates(self, input_ids, *args, **options)
        own[tuple(input_ids[0].tolist())] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    monkeypatch.setattr(generator, "get_candidates", recorded)
    ids = torch.tensor([PROMPTS[0]], device=DEVICE)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), use_mtp=True, **options)
    done = LM(model).generate(PROMPTS[0], max_new_tokens=NEW, strategy=Mtp(length=LAYOUTS[family][0], branches=1))
    assert PROMPTS[0] + done.token_ids == expected[0].tolist()
    assert len(drafts.found) > NEW // 2
    for text, draft in drafts.found.items():  # the last ones are cut to what may be emitted
        assert draft == own[text][: len(draft)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5_text", "bailing_hybrid"])
def test_sampled_texts_are_those_of_generate(family: str, with_heads: Any) -> None:
    model = with_heads(family)
    alike = [PROMPTS[0], PROMPTS[1][: len(PROMPTS[0])]]

    def sampled() -> list[list[int]]:
        ids = torch.tensor(alike, device=DEVICE)
        torch.manual_seed(5)
        options = {"max_new_tokens": NEW, "pad_token_id": 0, "temperature": 0.9, "repetition_penalty": 1.2}
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, **options).tolist()

    expected = sampled()
    state = torch.get_rng_state()
    for strategy in ("mtp", "auto"):
        lookfar.accelerate(model, strategy=strategy, budget=8)
        assert sampled() == expected
        assert torch.equal(torch.get_rng_state(), state)
        assert "mtp" in lookfar.last_stats(model).drafters
        lookfar.restore(model)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text"])
def test_weights_are_found_under_their_published_names(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_with_heads(family, tmp_path, monkeypatch)
    model = load_saved(tmp_path)
    before = dict(vars(model.config))
    loaded = load_heads(model).model.state_dict()
    assert saved.keys() <= loaded.keys()
    assert all(torch.equal(loaded[name], weight.to(loaded[name])) for name, weight in saved.items())
    assert vars(model.config) == before


@pytest.mark.slow
def test_prompts_in_chunks_captured_steps_and_reused_texts(with_heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafts = with_heads("deepseek_v3"), Drafts(monkeypatch)
    monkeypatch.setattr(mtp, "CHUNK", 8)  # prompts are taken in parts
    strategy = Mtp(length=2, branches=1)
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    lm = flat_lm(model)
    batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=strategy)
    assert [one.token_ids for one in batch] == expected
    heads = lm.engine.runner.model.heads
    for ids, draft in drafts.found.items():
        assert draft == drafts_from_scratch(model, heads, ids)[: len(draft)]
    drafts.found.clear()
    longer = PROMPTS[1] + expected[1][:4] + PROMPTS[2]
    lm.generate(PROMPTS[1], max_new_tokens=NEW, strategy=strategy, reuse=True)
    drafts.found.clear()
    again = lm.generate(longer, max_new_tokens=NEW, strategy=strategy, reuse=True)
    assert again.stats.reused_tokens >= len(PROMPTS[1])
    assert again.token_ids == reference(model, longer, NEW)
    assert len(drafts.found) > NEW // 2  # without the states of the reused part


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "bailing_hybrid"])
def test_a_step_that_fails_is_repeated_without_harm(
    family: str, with_heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafts = with_heads(family), Drafts(monkeypatch)
    lm = LM(model, prefill_chunk=16)
    runner, steps = lm.engine.runner, iter(range(100))
    launch = runner.launch

    def failing(*args: Any) -> Any:
        if next(steps) == 9:
            raise RuntimeError("once")
        return launch(*args)

    monkeypatch.setattr(runner, "launch", failing)
    done = lm.generate(PROMPTS[:2], max_new_tokens=NEW, strategy=Mtp(length=2, branches=1))
    assert [one.token_ids for one in done] == [reference(model, prompt, NEW) for prompt in PROMPTS[:2]]
    layers = LAYOUTS[family][0]
    for ids, draft in drafts.found.items():
        assert draft[:layers] == drafts_from_scratch(model, runner.model.heads, ids)[: len(draft)]


class ScriptedLayers:
    """Prediction layers that know the texts, and are right about a token with some probability."""

    def __init__(self, patch: pytest.MonkeyPatch, model: PreTrainedModel, texts: list[list[int]]) -> None:
        self.embed, self.texts = model.get_input_embeddings(), texts
        self.caches: list[tuple[Any, list[int]]] = []
        self.upcoming = 0
        own: Any = modeling_layers.MtpModel
        patch.setattr(own, "forward_layer", lambda _, *args, **inputs: self.forward_layer(*args, **inputs))
        patch.setattr(own, "_project_to_logits", lambda _, states: self.logits(states))

    def forward_layer(
        self, layer: int, states: torch.Tensor, positions: torch.Tensor, cache: Any, inputs_embeds: torch.Tensor
    ) -> torch.Tensor:
        if not any(cache is known for known, _ in self.caches):
            first = int(positions[0, 0])
            inputs = [self.embed(torch.tensor(text[first : first + positions.shape[1]])) for text in self.texts]
            found = (text for text, own in zip(self.texts, inputs, strict=True) if torch.equal(own, inputs_embeds[0]))
            self.caches.append((cache, next(found)))
        text = next(text for known, text in self.caches if cache is known)
        place = int(positions[0, -1]) + 1
        self.upcoming = text[place] + (not is_right(place)) if place < len(text) else 0
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*states.shape[:-1], 96)
        logits[..., self.upcoming % 96] = 10.0
        return logits


def is_right(place: int) -> bool:
    return random.Random(place).random() < 0.7


def sizes_of_steps(prompt: list[int], new: int) -> list[int]:
    """The tokens that each step emits with such layers, if none is lost."""
    sizes = [1]
    while (left := new - sum(sizes)) > 0:
        place = len(prompt) + sum(sizes)
        wrong = [i for i in range(LENGTH) if not is_right(place + i)]
        sizes.append(min(1 + (wrong[0] if wrong else LENGTH), left))
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_every_right_draft_is_accepted(family: str, with_heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_heads(family)
    expected = [reference(model, prompt, 2 * NEW) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    lm = LM(model)
    assert len(lm.engine.runner.model.heads) == LAYOUTS[family][0]
    ScriptedLayers(monkeypatch, model, texts)
    strategy = Mtp(length=LENGTH, branches=1)
    single = [lm.generate(prompt, max_new_tokens=2 * NEW, strategy=strategy) for prompt in PROMPTS]
    batch = lm.generate(PROMPTS, max_new_tokens=2 * NEW, strategy=strategy)
    branched = lm.generate(PROMPTS, max_new_tokens=2 * NEW, strategy=Mtp(length=LENGTH))
    for done in (single, batch, branched):
        assert [one.token_ids for one in done] == expected
        assert all(one.stats.tokens_per_step > 1.6 for one in done)
    assert [one.stats.step_sizes for one in single] == [sizes_of_steps(prompt, 2 * NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["deepseek_v3", "inkling_text"])
def test_short_prompts(family: str, with_heads: Any) -> None:
    model = with_heads(family)
    lm = LM(model)
    for prompt in ([5], [5, 6], [7, 8, 9]):
        done = lm.generate(prompt, max_new_tokens=8, strategy="mtp")
        assert done.token_ids == reference(model, prompt, 8)
        assert done.stats.drafters["mtp"].proposed


@pytest.mark.slow
def test_a_changed_model_and_another_precision(with_heads: Any) -> None:
    model = with_heads("glm4_moe")
    lm = LM(model)
    assert lm.generate(PROMPTS[0], max_new_tokens=8, strategy="mtp").token_ids == reference(model, PROMPTS[0], 8)
    bound, first = lm.engine.runner.model, lm.engine.runner.model.heads
    model.set_output_embeddings(torch.nn.Linear(32, 96, bias=False, dtype=torch.float64))
    assert lm.generate(PROMPTS[0], max_new_tokens=8, strategy="mtp").token_ids == reference(model, PROMPTS[0], 8)
    assert bound.heads is first
    assert bound.heads.model.shared_head is model.lm_head
    model.to(torch.float32)
    assert lm.generate(PROMPTS[0], max_new_tokens=8, strategy="mtp").token_ids == reference(model, PROMPTS[0], 8)
    assert bound.heads is not first
    assert bound.heads.model.layers[0].eh_proj.weight.dtype == torch.float32


def test_models_without_layers_are_refused_in_one_sentence(with_heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"since llama has none: choose another"):
        LM(tiny_model("llama"), strategy="mtp").generate(PROMPTS[2], max_new_tokens=2)
    with pytest.raises(ConfigError, match="holds no weights of them"):
        LM(tiny_model("glm4_moe")).generate(PROMPTS[2], max_new_tokens=2, strategy="auto+mtp")
    model = with_heads("glm4_moe")
    monkeypatch.delattr(modeling_layers.MtpModel, "from_pretrained")
    lm = LM(model)
    with pytest.raises(ConfigError, match="cannot be used"):
        lm.generate(PROMPTS[2], max_new_tokens=2, strategy="mtp")
    done = lm.generate(PROMPTS[2], max_new_tokens=4, strategy="auto", budget=8)
    assert done.token_ids == reference(model, PROMPTS[2], 4)
    assert "mtp" not in done.stats.drafters
    monkeypatch.delattr(modeling_layers, "MtpModel")
    with pytest.raises(ConfigError, match=r"cannot load them \(5.22 can\)"):
        LM(model).generate(PROMPTS[2], max_new_tokens=2, strategy="mtp")


def test_auto_takes_the_layers_where_there_are_some(with_heads: Any) -> None:
    without, auto = BoundModel(tiny_model("glm4_moe")), auto_strategies()
    model = BoundModel(with_heads("glm4_moe"))
    assert for_model(auto, without) == auto
    assert for_model(auto, model) == (*auto, Mtp(if_pays=True))
    assert for_model(parse_strategy("suffix+mtp"), model) == parse_strategy("suffix+mtp")
    assert for_model(parse_strategy("auto+mtp"), model) == parse_strategy("auto+mtp")
    assert for_model((), model) == ()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(mtp, "perf_counter", lambda: now[0])
    return now  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("gained", "spent", "pays"), [(2, 0.5, True), (0, 0.5, False), (1, 3.0, False), (1, 0.1, True)]
)
def test_layers_draft_while_it_pays(clock: list[float], gained: int, spent: float, pays: bool) -> None:
    """A step takes a second beside drafting, and emits one token more than the layers gain."""
    value, drafting = DraftingValue(LENGTH), []
    for _ in range(2000):
        drafts = value.pays
        drafting.append(drafts)
        clock[0] += 1.0 + spent * drafts
        value.learn(1 + gained * drafts, clock[0], gained if drafts else None, spent * drafts)
        value.seen = clock[0]
    assert drafting[0]
    share = sum(drafting[1000:]) / 1000
    assert share == 1.0 if pays else 0.0 < share < 0.1


def test_scores_follow_probabilities() -> None:
    assert [score_of(chance) for chance in (0.0, 0.1, 0.5, 0.9, 1.0)] == [0, 0, 5, 11, MAX_SCORE]
    proposal = as_proposal([([7, 8], [0.9, 0.05]), ([3, 4], [0.5, 0.4])])
    assert proposal.drafts.tolist() == [[7, -1], [8, -1], [7, 3], [7, 4]]
    assert proposal.weights.tolist() == pytest.approx([0.9, 0.05, 0.45, 0.36])
    assert proposal.scores.tolist() == [11, 0, 4, 3]
    assert not len(as_proposal([]).drafts)


@pytest.mark.slow
def test_it_keeps_the_contract_of_drafters(with_heads: Any) -> None:
    check_strategy(Mtp(), with_heads("glm4_moe", dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_states_are_kept_while_speculation_is_off(
    family: str, with_heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafts = with_heads(family), Drafts(monkeypatch)
    lm = LM(model, prefill_chunk=16)
    decisions = iter([False] * 8 + [True] * 4 + [False] * 3 + [True] * 50)
    monkeypatch.setattr(SpeculationController, "decide", lambda self, rate: next(decisions))
    monkeypatch.setattr(DraftingValue, "pays", True)
    lm.engine.speculator.costs = CostCurve({1: 1.0, 8: 1.0, 16: 1.1})
    for prompt in PROMPTS[:1]:
        done = lm.generate(prompt, max_new_tokens=2 * NEW)
        assert done.token_ids == reference(model, prompt, 2 * NEW)
    assert 0 < len(drafts.found) < 2 * NEW - 10
    heads, layers = lm.engine.runner.model.heads, LAYOUTS[family][0]
    for ids, draft in drafts.found.items():
        assert draft[:layers] == drafts_from_scratch(model, heads, ids)[: len(draft)]


def test_settings_are_checked() -> None:
    assert parse_strategy("mtp", {"length": "2", "branches": "1"}) == (Mtp(length=2, branches=1),)
    assert Mtp(length=2, branches=3).max_rows == 6
    with pytest.raises(ConfigError, match="length must be"):
        Mtp(length=0)
