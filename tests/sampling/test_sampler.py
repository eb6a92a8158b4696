"""Sampled tokens are those of `model.generate` under the same seed; and, on its own, the right distribution."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from families import DEVICE, tiny_model
from helpers import random_prompts, random_state
from lookfar import LM, Lookahead
from lookfar.errors import RequestError
from lookfar.sampling.penalties import EmittedPenalty

FAMILIES = ["llama", "gpt2", "mistral", "gemma2", "qwen3", "gpt_neox", "phi", "mixtral", "bloom", "olmo2"]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 1.3, "top_k": 0, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 12, "min_p": 0.05},
    {"temperature": 1.1, "typical_p": 0.7, "top_k": 0},
    {"temperature": 1.5, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_k": 0},
    {"temperature": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"temperature": 1.0, "bad_words_ids": [[5], [6, 7]], "min_new_tokens": 4, "renormalize_logits": True},
    {"temperature": 1.0, "suppress_tokens": [9, 11], "forced_eos_token_id": 2, "begin_suppress_tokens": [4]},
    {
        "temperature": 1.0,
        "sequence_bias": [[[12], 3.0], [[13, 14], 5.0]],
        "exponential_decay_length_penalty": [3, 1.2],
        "eos_token_id": 7,
    },
    {"top_h": 0.6, "temperature": 0.9},
    {"temperature": 0.6, "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
]


def sampled(model: PreTrainedModel, prompt: list[int], new: int, seed: int, **arguments: Any) -> list[int]:
    torch.manual_seed(seed)
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=True, pad_token_id=0, **arguments
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def lm(llama: PreTrainedModel) -> LM:
    return LM(llama)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", SETTINGS, ids=lambda arguments: "-".join(arguments))
def test_every_way_to_sample_is_that_of_transformers(lm: LM, arguments: dict[str, Any]) -> None:
    for seed, prompt in enumerate(random_prompts(4, 23, 1)):
        expected = sampled(lm.model, prompt, 25, seed, **arguments)
        after = random_state()
        for strategy in ("auto", "none", Lookahead(3, 3, 3), "jacobi"):
            assert (
                lm.generate(prompt, max_new_tokens=25, seed=seed, strategy=strategy, **arguments).token_ids == expected
            )
        torch.manual_seed(seed)  # torch's own generator is used as `generate` uses it, and left as it leaves it
        assert lm.generate(prompt, max_new_tokens=25, do_sample=True, **arguments).token_ids == expected
        assert torch.equal(random_state(), after)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_in_float64(family: str) -> None:
    lm = LM(tiny_model(family))
    prompts = random_prompts(5, 18, 11, seed=3)
    for seed, arguments in enumerate(SETTINGS[:4]):
        expected = [sampled(lm.model, prompt, 20, seed, **arguments) for prompt in prompts]
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert lm.generate(prompt, max_new_tokens=20, seed=seed, **arguments).token_ids == tokens


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_ragged_batches_draw_as_one_padded_batch_does(llama: PreTrainedModel, max_batch: int) -> None:
    """Rows finish at different times and take slots after each other, and still get their own row's noise."""
    lm = LM(llama, max_batch=max_batch)
    prompts = random_prompts(3, 17, 8, 12, 1)
    for seed in range(4):
        arguments = {"temperature": 1.2, "top_k": 0, "eos_token_id": list(range(40, 50))}
        torch.manual_seed(seed)
        out = llama.generate(**left_padded(prompts), max_new_tokens=30, do_sample=True, pad_token_id=0, **arguments)
        after = random_state()
        torch.manual_seed(seed)
        done = lm.generate(prompts, max_new_tokens=30, do_sample=True, **arguments)
        assert torch.equal(random_state(), after)
        for row, completion in zip(out[:, 17:].tolist(), done, strict=True):
            assert row == completion.token_ids + [0] * (len(row) - len(completion.token_ids))
        assert len({len(completion.token_ids) for completion in done}) > 1


def test_a_generator_goes_on_from_call_to_call(lm: LM) -> None:
    prompt = random_prompts(6)[0]
    torch.manual_seed(7)
    ids = torch.tensor([prompt], device=DEVICE)
    keep = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": True, "pad_token_id": 0}
    expected = [lm.model.generate(ids, **keep)[0, 6:].tolist() for _ in range(3)]
    generator = torch.Generator(DEVICE).manual_seed(7)
    got = [lm.generate(prompt, max_new_tokens=9, do_sample=True, generator=generator).token_ids for _ in range(3)]
    assert got == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_temperature_zero_means_the_best_token(lm: LM) -> None:
    prompt = random_prompts(6)[0]
    assert lm.generate(prompt, temperature=0).token_ids == lm.generate(prompt).token_ids
    assert lm.generate(prompt, temperature=0.0, top_p=0.9).token_ids == lm.generate(prompt).token_ids


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"seed": 1, "generator": torch.Generator(DEVICE)}, "a seed or a generator"),
        ({"temprature": 0.5}, "temprature is not a generation argument"),
        ({"num_beams": 3}, "for beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "one sequence for each prompt"),
        ({"guidance_scale": 1.5}, "runs the model twice"),
        ({"temperature": -1.0}, "cannot be used"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"stop_strings": ["x"]}, "need a tokenizer"),
        ({"seed": "x", "do_sample": True}, "seed must be a whole number"),
    ],
)
def test_bad_arguments_are_one_sentence(lm: LM, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        lm.generate([4, 5, 6], **arguments)


class Stateful(LogitsProcessor):
    """Forbids what it forbade the fewest times: its answers depend on how often and in which order it was called."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(int(input_ids[0, -1]))
        return scores.index_fill(1, torch.tensor([sum(self.calls) % 90], device=scores.device), -torch.inf)


def test_a_processor_is_called_once_for_each_token_in_order(lm: LM) -> None:
    prompt = random_prompts(9)[0]
    theirs, ours = Stateful(), Stateful()
    expected = sampled(lm.model, prompt, 30, 5, temperature=0.3, logits_processor=LogitsProcessorList([theirs]))
    lm.generate(prompt, max_new_tokens=30, seed=5, temperature=0.3)  # something to draft from
    done = lm.generate(prompt, max_new_tokens=30, seed=5, temperature=0.3, logits_processor=[ours])
    assert done.token_ids == expected
    assert ours.calls == theirs.calls


def test_processors_for_several_prompts_must_be_for_each_alone(lm: LM) -> None:
    with pytest.raises(RequestError, match="may read all prompts at once"):
        lm.generate(random_prompts(5, 9), logits_processor=[Stateful()])


def test_penalties_on_what_was_emitted(lm: LM) -> None:
    """By the definition: presence once, frequency for each time, the prompt not counted."""
    prompt = random_prompts(9)[0]
    tokens = lm.generate(prompt, max_new_tokens=20, presence_penalty=1.0, frequency_penalty=0.5).token_ids
    text = list(prompt)
    for token in tokens:
        with torch.no_grad():
            logits = lm.model(torch.tensor([text], device=DEVICE)).logits[0, -1].float()
        for seen in set(text[9:]):
            logits[seen] -= 1.0 + 0.5 * text[9:].count(seen)
        assert token == int(logits.argmax())
        text.append(token)
    assert tokens != lm.generate(prompt, max_new_tokens=20).token_ids


def test_penalties_do_not_count_the_prompt() -> None:
    ids = torch.tensor([[5, 6, 5, 7, 7], [7, 7, 3, 3, 3]])
    scores = EmittedPenalty(2, presence=1.0, frequency=0.25)(ids, torch.zeros(2, 9))
    assert scores[0].tolist() == [0, 0, 0, 0, 0, -1.25, 0, -1.5, 0]
    assert scores[1].tolist() == [0, 0, 0, -1.75, 0, 0, 0, 0, 0]


def chi_square(counts: list[int], probabilities: list[float], draws: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom, with rare outcomes taken together."""
    bins = sorted(zip(probabilities, counts, strict=True))
    total, freedom, rare, seen = 0.0, -1, 0.0, 0
    for probability, count in bins:
        rare, seen = rare + probability, seen + count
        if rare * draws >= 8:
            total += (seen - rare * draws) ** 2 / (rare * draws)
            freedom, rare, seen = freedom + 1, 0.0, 0
    return total, freedom


@pytest.mark.slow
def test_the_distribution_is_the_models_own() -> None:
    """Without seeds, pairs of tokens are as frequent as the model's probabilities, while drafts are accepted."""
    model = tiny_model("llama", vocab_size=12)
    lm = LM(model, max_batch=64, budget=8)
    prompt = [3, 4, 5]

    def after(text: list[int]) -> torch.Tensor:
        chances: torch.Tensor = model(torch.tensor([text], device=DEVICE)).logits[0, -1].div(0.7).softmax(-1)
        return chances

    with torch.no_grad():
        first = after(prompt)
        both = [first[a] * after([*prompt, a]) for a in range(12)]
    exact = torch.stack(both).flatten().tolist()
    draws, counts, accepted = 4096, [0] * 144, 0
    rng = random.Random(0)
    for _ in range(draws // 64):
        generator = torch.Generator(DEVICE).manual_seed(rng.getrandbits(60))
        done = lm.generate(
            [prompt] * 64, max_new_tokens=3, temperature=0.7, top_k=0, eos_token_id=None, generator=generator
        )
        for completion in done:
            counts[completion.token_ids[0] * 12 + completion.token_ids[1]] += 1
            accepted += completion.stats.steps < 3
    statistic, freedom = chi_square(counts, exact, draws)
    assert freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations
    uniform, its_freedom = chi_square(counts, [1 / 144] * 144, draws)
    assert uniform > its_freedom + 20 * (2 * its_freedom) ** 0.5  # and the test can tell
    assert accepted > draws / 3


def test_calls_that_share_a_step_keep_their_own_noise(lm: LM) -> None:
    prompt = random_prompts(7)[0]
    expected = [sampled(lm.model, prompt, 15, seed, temperature=1.1) for seed in (1, 2)]
    streams = [lm.stream(prompt, max_new_tokens=15, seed=seed, temperature=1.1) for seed in (1, 2)]
    got: list[list[int]] = [[], []]
    while any(len(tokens) < 15 for tokens in got):
        for tokens, stream in zip(got, streams, strict=True):
            if (chunk := next(stream, None)) is not None:
                tokens += chunk.token_ids
    assert got == expected


@pytest.mark.slow
def test_drafts_meet_the_noise_they_were_ranked_with(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the model's predictions are known, so are the next tokens: most drafts are accepted."""
    prompt = random_prompts(12)[0]

    def tokens_per_step(ahead: int) -> float:
        monkeypatch.setattr("lookfar.sampling.noise.LOOK_AHEAD", ahead)
        lm.forget()
        tokens = steps = 0
        for seed in range(12):
            done = lm.generate(
                prompt, max_new_tokens=20, seed=seed, temperature=1.0, top_k=0, strategy="recycle", budget=6
            )
            tokens, steps = tokens + done.stats.tokens, steps + done.stats.steps
        return tokens / steps

    assert tokens_per_step(8) > 1.05 * tokens_per_step(0)
