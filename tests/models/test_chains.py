"""Models whose drafts are verified as chains give the tokens of their own `generate`, alone and in ragged batches."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel, __version__

import lookfar
from families import CHAINS, FALLBACK, RECURRENT, TREES, WINDOW, tiny_model
from helpers import random_prompts, reference
from lookfar.drafters.base import Strategy
from lookfar.drafters.scripted import Scripted
from lookfar.kvcache.recurrent import RecurrentBuffers
from lookfar.models.time_steps import has_time_step_limits

PROMPTS = random_prompts(3 * WINDOW, 4 * WINDOW + 1, 5)  # the second leaves one token after two chunks of 16
NEW = 20
DRAFTS = 4


def num_right(length: int, right: float = 0.7) -> int:
    """How many tokens of a draft are right after a text of some length: the same for all models."""
    rng = random.Random(length)
    return DRAFTS if rng.random() < right else rng.randrange(DRAFTS)


def often_right(prompts: list[list[int]], texts: list[list[int]], right: float = 0.7) -> Strategy:
    """Drafts whose tokens are right with some probability, after the first token of an answer."""

    def script(ids: Seq[int]) -> list[list[int]]:
        known = [prompt + text for prompt, text in zip(prompts, texts, strict=True) if len(prompt) < len(ids)]
        rest = next((text[len(ids) :] for text in known if text[: len(ids)] == list(ids)), [])
        good = num_right(len(ids), right)
        draft = rest[:good] + [(token + 1) % 90 for token in rest[good:DRAFTS]]
        return [draft] if draft else []

    return Scripted(script)


def sizes_of_steps(prompt: list[int]) -> list[int]:
    """The tokens that each step emits with such drafts, if none is lost."""
    sizes = [1]
    while (left := NEW - sum(sizes)) > 0:
        sizes.append(min(num_right(len(prompt) + sum(sizes)) + 1, left))
    return sizes


def generate(model: PreTrainedModel, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """The new tokens of a padded call of `model.generate` with a seed."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()


RECURRENT_HERE = [family for family in RECURRENT if family in CONFIG_MAPPING]  # in this version of transformers
CHAINS_HERE = [family for family in CHAINS if family != "roformer" or __version__ >= "5.22"]  # it counted otherwise


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *RECURRENT_HERE, *CHAINS_HERE])
def test_families_give_their_own_tokens_in_as_many_steps_as_a_transformer(family: str) -> None:
    model = tiny_model(family)
    lm = lookfar.LM(model, prefill_chunk=16)
    support = lm.engine.runner.model.support
    assert support.mode == ("tree" if family in TREES else "chain"), support.reason
    assert support.recurrent == (family in RECURRENT)
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    drafts = often_right(PROMPTS, expected)
    single = [lm.generate(prompt, max_new_tokens=NEW, strategy=drafts) for prompt in PROMPTS]
    batch = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=drafts)
    with_auto = lm.generate(PROMPTS, max_new_tokens=NEW, strategy="auto", budget=8)
    for done in (single, batch, with_auto):
        assert [one.token_ids for one in done] == expected
    # Rejection, replay and full acceptance all occur, and the walk along a chain loses nothing.
    sizes = [sizes_of_steps(prompt) for prompt in PROMPTS]
    assert {1, 2, DRAFTS + 1} <= {size for of_one in sizes for size in of_one}
    assert [one.stats.step_sizes for one in single] == sizes
    assert any(one.stats.replayed_rows for one in single) == support.recurrent
    assert any(one.stats.replayed_rows for one in batch) == support.recurrent


@pytest.mark.slow
@pytest.mark.parametrize("family", [*RECURRENT_HERE, *CHAINS_HERE])
def test_sampled_texts_equal_those_of_generate(family: str) -> None:
    model = tiny_model(family)
    alike = [PROMPTS[0], PROMPTS[1][: len(PROMPTS[0])]]  # padding would shift the positions of some
    for prompts in (PROMPTS[:1], PROMPTS[1:] if family in [*RECURRENT, "gpt_neo"] else alike):
        options = {"do_sample": True, "temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2}
        expected = generate(model, prompts, **options)
        state = torch.get_rng_state()
        lookfar.accelerate(model, strategy=often_right(prompts, expected), budget=None)
        assert generate(model, prompts, **options) == expected
        assert torch.equal(torch.get_rng_state(), state)
        assert lookfar.last_stats(model).tokens_per_step > 1.5
        lookfar.restore(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", FALLBACK)
def test_other_families_say_why(family: str) -> None:
    support = lookfar.LM(tiny_model(family, torch.float32)).engine.runner.model.support
    assert support.mode == "none"
    assert support.reason


def test_at_least_fifteen_recurrent_families() -> None:
    assert len(RECURRENT_HERE) >= 15


@pytest.mark.slow
def test_time_step_limits_hold_for_prompts_and_not_for_answers() -> None:
    """transformers limits time steps where there are several tokens; `generate` decodes with single ones."""
    model = tiny_model("zamba2")
    own = [module.time_step_limit for module in model.modules() if hasattr(module, "time_step_limit")]
    assert has_time_step_limits(model)
    prompt = random_prompts(17)[0]
    expected = reference(model, prompt, NEW)
    lm = lookfar.LM(model, prefill_chunk=16)
    drafts = often_right([prompt], [expected], right=0.9)
    assert lm.generate(prompt, max_new_tokens=NEW, strategy=drafts).token_ids == expected
    assert [module.time_step_limit for module in model.modules() if hasattr(module, "time_step_limit")] == own
    assert lm.generate(prompt + expected, max_new_tokens=4, reuse=True).stats.reused_tokens == 0


@pytest.mark.slow
def test_threads_share_a_model_with_recurrent_state() -> None:
    """Some through one LM, one through transformers itself, whose time steps stay limited meanwhile."""
    model = tiny_model("zamba2")
    prompts = random_prompts(20, 9, 14)
    expected = [reference(model, prompt, NEW) for prompt in prompts]
    logits = model(torch.tensor(prompts[:1])).logits
    lm = lookfar.LM(model, prefill_chunk=16)
    found: dict[int, bool] = {}

    def decode(i: int) -> None:
        drafts = often_right([prompts[i]], [expected[i]])
        found[i] = all(
            lm.generate(prompts[i], max_new_tokens=NEW, strategy=drafts).token_ids == expected[i] for _ in range(2)
        )

    def use() -> None:
        found[-1] = all(torch.equal(model(torch.tensor(prompts[:1])).logits, logits) for _ in range(20))

    threads = [Thread(target=decode, args=(i,)) for i in range(len(prompts))] + [Thread(target=use)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys([-1, 0, 1, 2], True)


def test_a_model_that_forgets_its_state_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel without an initial state would do."""
    model = tiny_model("lfm2")
    begin = RecurrentBuffers.set_states
    monkeypatch.setattr(RecurrentBuffers, "set_states", lambda self, states, continues: begin(self, states, False))
    support = lookfar.LM(model).engine.runner.model.support
    assert support.mode == "none"
    assert "several tokens at once" in support.reason


def test_wrong_drafts_are_settled_before_they_are_fed_again_for_ever() -> None:
    model = tiny_model("lfm2")
    expected = reference(model, PROMPTS[0], 40)
    text = PROMPTS[0] + expected
    wrong = Scripted(lambda ids: [[(token + 1) % 90 for token in text[len(ids) : len(ids) + DRAFTS]]])
    done = lookfar.LM(model).generate(PROMPTS[0], max_new_tokens=40, strategy=wrong)
    assert done.token_ids == expected
    assert done.stats.step_sizes == [1] * 40
    # Each round feeds 1, 2, … 17 pending tokens, and the last of its steps has no drafts.
    assert done.stats.replayed_rows == 2 * sum(range(17)) + sum(range(40 - 1 - 2 * 17))
    assert done.stats.as_dict()["replayed_rows"] == done.stats.replayed_rows


def test_a_prompt_that_continues_an_answer_starts_from_its_state() -> None:
    model = tiny_model("qwen3_next")
    lm = lookfar.LM(model)
    first = lm.generate(PROMPTS[0], max_new_tokens=12, strategy="none", reuse=True)
    longer = PROMPTS[0] + first.token_ids + PROMPTS[2]
    again = lm.generate(longer, max_new_tokens=8, strategy="none", reuse=True)
    assert again.stats.reused_tokens == len(PROMPTS[0]) + 11  # the last token was never fed
    assert again.token_ids == reference(model, longer, 8)
    other = lm.generate(PROMPTS[0], max_new_tokens=8, strategy="none", reuse=True)
    assert other.stats.reused_tokens == 0  # a state cannot be cut back to a shorter text
    assert other.token_ids == reference(model, PROMPTS[0], 8)


def test_a_cache_that_was_asked_for_holds_the_state_of_generate() -> None:
    model = tiny_model("falcon_h1")
    ids = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    lookfar.accelerate(model)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for own, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.allclose(own.keys, other.keys)
        assert torch.allclose(own.recurrent_states[0], other.recurrent_states[0], atol=1e-5)
    longer = torch.cat([found.sequences, ids], -1)
    with pytest.warns(UserWarning, match="continues from a recurrent state"):
        model.generate(longer, past_key_values=found.past_key_values, max_new_tokens=2, pad_token_id=0)
    lookfar.restore(model)
