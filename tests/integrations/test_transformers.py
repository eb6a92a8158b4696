"""`model.generate` of an accelerated model: what transformers' own generation tests cover, compared with transformers.

Every test runs a plain model and an accelerated copy with the same arguments and seed, and compares all that comes
back: tokens, scores, logits, caches, what a streamer was given, and the state of the random generator.
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import BaseStreamer

import lookfar
from families import DEVICE, tiny_model
from helpers import byte_tokenizer, random_prompts, random_state
from lookfar.errors import LookfarWarning, RequestError
from lookfar.integrations.transformers.state import state_of

EOS, PAD = 7, 0


class Pair:
    """A plain model and an accelerated copy of it."""

    def __init__(self, family: str, **changes: Any) -> None:
        self.plain = tiny_model(family, **changes)
        self.plain.generation_config.eos_token_id = EOS
        self.plain.generation_config.pad_token_id = PAD
        self.fast = lookfar.accelerate(copy.deepcopy(self.plain))

    def both(self, *inputs: Any, seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
        """What both return, and that they agree. Accelerated means accelerated: no warning that it is not."""
        torch.manual_seed(seed)
        expected = self.plain.generate(*inputs, **arguments)
        state = random_state()
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LookfarWarning)
            got = self.fast.generate(*inputs, **arguments)
        assert torch.equal(random_state(), state)
        assert lookfar.last_stats(self.fast).tokens > 0
        same(expected, got)
        return expected, got

    def passed_on(self, why: str, *inputs: Any, **arguments: Any) -> None:
        """transformers decodes it, and that is said."""
        torch.manual_seed(0)
        expected = self.plain.generate(*inputs, **arguments)
        state_of(self.fast)._warned.clear()
        torch.manual_seed(0)
        with pytest.warns(LookfarWarning, match=why):
            same(expected, self.fast.generate(*inputs, **arguments))


def same(a: Any, b: Any, where: str = "output") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor) and not a.is_floating_point():
        assert torch.equal(a, b), where
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6, msg=where)
    elif isinstance(a, tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    elif isinstance(a, Cache):
        assert a.get_seq_length() == b.get_seq_length(), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair("llama")


def one(length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.tensor(random_prompts(length, seed=seed), device=DEVICE)


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    prompts = random_prompts(*lengths)
    ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths], device=DEVICE)
    return {"input_ids": ids, "attention_mask": mask}


# Greedy search and sampling


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "qwen3", "bloom", "mixtral", "opt"])
def test_generate(family: str, do_sample: bool) -> None:
    both = Pair(family)
    for seed in range(3):
        both.both(one(seed=seed), seed=seed, max_new_tokens=20, do_sample=do_sample)
        both.both(one(5, seed).expand(3, -1), seed=seed, max_new_tokens=20, do_sample=do_sample)


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "inputs", [{"input_ids": one()}, padded(3, 14, 9), padded(6, 6)], ids=["one", "ragged", "even"]
)
def test_dict_outputs(pair: Pair, inputs: dict[str, torch.Tensor], do_sample: bool) -> None:
    """Scores and logits of every step, also of rows that are done while others go on."""
    for seed in range(3):
        expected, got = pair.both(
            **inputs,
            seed=seed,
            max_new_tokens=30,
            do_sample=do_sample,
            temperature=2.5 if do_sample else 1.0,
            repetition_penalty=1.2,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        theirs = pair.plain.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
        ours = pair.fast.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
        same(theirs, ours)
        for a, b in zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True):
            if "attention_mask" not in inputs:
                same(a.keys, b.keys)
                same(a.values, b.values)


def test_the_cache_of_a_padded_prompt_has_its_padding(pair: Pair) -> None:
    ids = torch.cat([torch.full((1, 3), PAD, device=DEVICE), one()], -1)
    mask = torch.tensor([[0] * 3 + [1] * 12], device=DEVICE)
    arguments = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    expected, got = pair.both(ids, attention_mask=mask, **arguments)
    for a, b in zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True):
        same(a.keys[:, :, 3:], b.keys[:, :, 3:])


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2"])
def test_the_cache_of_a_batch_has_the_same_padding(family: str) -> None:
    """Eager attention writes something for padding, which depends on how much text it is computed with."""
    both = Pair(family, dtype=torch.float32)
    for model in (both.plain, both.fast):
        model.set_attn_implementation("eager")
    expected, got = both.both(**padded(3, 14, 9), max_new_tokens=6, return_dict_in_generate=True)
    for a, b in zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a.values, b.values, atol=1e-4, rtol=1e-4)


def test_only_what_was_asked_for_comes_back(pair: Pair) -> None:
    _, got = pair.both(one(), max_new_tokens=5, return_dict_in_generate=True)
    assert got.scores is None
    assert got.logits is None
    pair.both(one(), max_new_tokens=5, return_dict_in_generate=True, output_logits=True)
    pair.both(one(), max_new_tokens=5, output_scores=True)  # without return_dict_in_generate it means nothing


def test_several_sequences_for_each_prompt(pair: Pair) -> None:
    expected, _ = pair.both(**padded(4, 9), do_sample=True, num_return_sequences=3, max_new_tokens=15, top_k=0)
    assert len({tuple(row.tolist()) for row in expected}) > 2


def test_left_padding_changes_nothing(pair: Pair) -> None:
    pair.both(**padded(2, 30, 11, 7), max_new_tokens=25)
    pair.both(**padded(2, 30, 11, 7), max_new_tokens=25, do_sample=True, min_new_tokens=10, no_repeat_ngram_size=2)
    pair.both(**padded(9), max_new_tokens=5)
    inputs = padded(9, 15)  # padding that transformers has to find by itself
    pair.both(inputs["input_ids"], max_new_tokens=9)


def test_the_ways_to_give_a_prompt(pair: Pair) -> None:
    pair.both(inputs=one(), max_new_tokens=5)
    pair.both(input_ids=one(), max_new_tokens=5)
    pair.both(one().int(), max_new_tokens=5)
    pair.both(one(), attention_mask=torch.ones(1, 12, device=DEVICE), max_new_tokens=5)
    pair.both(one(), position_ids=torch.arange(12, device=DEVICE)[None], max_new_tokens=5)
    config = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=0.7, pad_token_id=PAD, eos_token_id=EOS)
    pair.both(one(), generation_config=config)
    pair.both(one())  # twenty new tokens by default


# Stopping


def test_lengths(pair: Pair) -> None:
    for arguments in ({"max_new_tokens": 1}, {"max_length": 20}, {"max_length": 15, "min_length": 14}):
        pair.both(one(), **arguments)
    pair.both(one(), stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(16)]), max_length=20)


def first_tokens(pair: Pair, count: int) -> list[int]:
    out = pair.plain.generate(one(), max_new_tokens=count, eos_token_id=None)
    tokens: list[int] = out[0, 12:].tolist()
    return tokens


def test_end_tokens_one_and_many(pair: Pair) -> None:
    tokens = first_tokens(pair, 20)
    for stop in (tokens[6], [tokens[6]], [tokens[11], tokens[6], 3], [95], None):
        pair.both(one(), max_new_tokens=20, eos_token_id=stop)
        pair.both(**padded(12, 5, 8), max_new_tokens=20, eos_token_id=stop)


class EndsWith(StoppingCriteria):
    """Counts its calls, so that it can be seen that there is one for each token."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        if scores is not None:
            assert len(scores) == input_ids.shape[1] - 12
        return input_ids[:, -1] == self.token


class RowEndsWith(EndsWith):
    row_wise = True


def test_custom_criteria_are_asked_after_every_token(pair: Pair) -> None:
    token = first_tokens(pair, 20)[9]
    theirs, ours = EndsWith(token), EndsWith(token)
    arguments: dict[str, Any] = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True}
    expected = pair.plain.generate(one(), stopping_criteria=StoppingCriteriaList([theirs]), **arguments)
    got = pair.fast.generate(one(), stopping_criteria=StoppingCriteriaList([ours]), **arguments)
    same(expected, got)
    assert theirs.lengths == ours.lengths
    assert got.sequences.shape[1] < 32
    pair.both(**padded(12, 5, 8), max_new_tokens=20, stopping_criteria=StoppingCriteriaList([RowEndsWith(token)]))
    pair.passed_on(
        "a stopping criterion may read the whole batch",
        **padded(12, 5),
        max_new_tokens=20,
        stopping_criteria=StoppingCriteriaList([EndsWith(token)]),
    )
    pair.passed_on(
        "no end token to pad with",
        **padded(12, 5),
        max_new_tokens=20,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([RowEndsWith(token)]),
    )


def test_time_runs_out(pair: Pair) -> None:
    out = pair.fast.generate(one(), max_new_tokens=200, eos_token_id=None, max_time=1e-6)
    assert out.shape[1] == 13  # as in transformers, time is looked at after a token
    out = pair.fast.generate(one(), max_new_tokens=5, stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(60.0)]))
    assert out.shape[1] <= 17


# Logits processors


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.4},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [4, 5]]},
        {"sequence_bias": [[[10], 5.0], [[11, 12], -2.0]]},
        {"min_length": 18},
        {"min_new_tokens": 9},
        {"forced_bos_token_id": 5},
        {"forced_eos_token_id": 9},
        {"remove_invalid_values": True},
        {"exponential_decay_length_penalty": (2, 1.1)},
        {"suppress_tokens": [4, 5, 6]},
        {"begin_suppress_tokens": [4, 5, 6]},
        {"renormalize_logits": True},
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
        {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] + 1 + row) % 90, int(ids[-2]), 50]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_every_processor_that_generate_builds(pair: Pair, arguments: dict[str, Any]) -> None:
    for do_sample in (False, True):
        pair.both(one(), max_new_tokens=20, do_sample=do_sample, **arguments)
        pair.both(**padded(4, 12, 9), max_new_tokens=20, do_sample=do_sample, **arguments)


class Add(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, int(input_ids[0, -1]) % 50] += 1.5  # in place, as many do
        return scores


class AddToRows(LogitsProcessor):
    row_wise = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, input_ids[:, -1:] % 50, torch.full((len(scores), 1), 1.5, device=scores.device))


class OfRow(LogitsProcessor):
    """Counts what each row has seen; says how it is made for one row."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.row: int | None = None

    def for_row(self, row: int) -> OfRow:
        own = OfRow()
        own.row = row
        return own

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for i in range(len(scores)):
            row = i if self.row is None else self.row
            self.counts[row] = self.counts.get(row, 0) + 1
            scores[i, (self.counts[row] + row) % 90] += 2.0
        return scores


def test_custom_processors(pair: Pair) -> None:
    pair.both(one(), max_new_tokens=20, logits_processor=LogitsProcessorList([Add()]))
    pair.both(**padded(4, 12), max_new_tokens=20, do_sample=True, logits_processor=LogitsProcessorList([AddToRows()]))
    inputs = padded(4, 12, 9)
    expected = pair.plain.generate(**inputs, max_new_tokens=9, logits_processor=LogitsProcessorList([OfRow()]))
    same(expected, pair.fast.generate(**inputs, max_new_tokens=9, logits_processor=LogitsProcessorList([OfRow()])))
    pair.passed_on(
        "a logits processor may read the whole batch",
        **padded(4, 12),
        max_new_tokens=9,
        logits_processor=LogitsProcessorList([Add()]),
    )


# Streamers


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.parametrize("inputs", [{"input_ids": one()}, padded(3, 14, 9)], ids=["one", "batch"])
def test_a_streamer_gets_what_transformers_gives_it(pair: Pair, inputs: dict[str, torch.Tensor]) -> None:
    for how in ({}, {"custom_generate": lookfar.generate}):
        theirs, ours = Recorder(), Recorder()
        arguments = {**inputs, "max_new_tokens": 20, "do_sample": False, "eos_token_id": list(range(30, 45))}
        out = pair.plain.generate(**arguments, streamer=theirs)
        model = pair.plain if how else pair.fast
        model.generate(**arguments, streamer=ours, **how)
        assert ours.got == theirs.got
        assert len(inputs) == 1 or PAD in out[:, -1]  # some row ended before the others
    lookfar.restore(pair.plain)


def test_a_streamer_that_gives_up_frees_the_slots(pair: Pair) -> None:
    class GivesUp(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.got) == 4:
                raise ConnectionError

    with pytest.raises(ConnectionError):
        pair.fast.generate(one(), max_new_tokens=30, eos_token_id=None, streamer=GivesUp())
    lm = state_of(pair.fast).lm
    assert lm is not None
    assert lm.engine.scheduler.is_idle
    pair.both(one(), max_new_tokens=9)


# Embeddings and caches


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "qwen2"])
def test_prompts_as_embeddings(family: str) -> None:
    both = Pair(family)
    embed = both.plain.get_input_embeddings()
    with torch.no_grad():
        both.both(inputs_embeds=embed(one()), max_new_tokens=15)
        both.both(inputs_embeds=embed(one()), max_new_tokens=15, do_sample=True, repetition_penalty=1.3)
        both.both(inputs_embeds=embed(one()), input_ids=one(), max_new_tokens=15)
        both.both(inputs_embeds=embed(one()), max_length=20)
        both.both(inputs_embeds=torch.randn_like(embed(one(30))), max_new_tokens=15)
        both.both(inputs_embeds=embed(one(5).expand(3, -1)), max_new_tokens=15, do_sample=True)
        if family == "llama":
            inputs = padded(4, 12)
            both.both(
                inputs_embeds=embed(inputs["input_ids"]), attention_mask=inputs["attention_mask"], max_new_tokens=9
            )


def test_long_prompts_as_embeddings_are_prefilled_in_chunks(llama: PreTrainedModel) -> None:
    fast = lookfar.accelerate(copy.deepcopy(llama), prefill_chunk=8)
    embeds = torch.randn(2, 30, 32, dtype=llama.dtype, device=DEVICE)
    arguments = {"attention_mask": torch.ones(2, 30, device=DEVICE), "max_new_tokens": 9, "pad_token_id": 0}
    expected = llama.generate(inputs_embeds=embeds, **arguments)
    same(expected, fast.generate(inputs_embeds=embeds, **arguments))


def test_going_on_from_a_cache(pair: Pair) -> None:
    """A chat: every turn continues from the KV of the last one, by lookfar or by transformers."""
    for order in ("ours", "theirs"):
        text, cache = one(), None
        for turn in range(3):
            mine = copy.deepcopy(cache)
            expected = pair.plain.generate(text, past_key_values=cache, max_new_tokens=6, return_dict_in_generate=True)
            with warnings.catch_warnings():
                warnings.simplefilter("error", LookfarWarning)
                got = pair.fast.generate(text, past_key_values=mine, max_new_tokens=6, return_dict_in_generate=True)
            same(expected, got)
            for a, b in zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True):
                same(a.keys, b.keys)
            cache = got.past_key_values if order == "ours" else expected.past_key_values
            text = torch.cat([expected.sequences, one(4, seed=turn)], -1)
        whole = pair.plain.generate(text, max_new_tokens=6)
        same(whole, pair.fast.generate(text, past_key_values=cache, max_new_tokens=6))


def test_going_on_from_a_cache_that_another_model_filled(pair: Pair) -> None:
    out = pair.plain.generate(one(), max_new_tokens=6, return_dict_in_generate=True)
    text = torch.cat([out.sequences, one(4)], -1)
    stranger = lookfar.accelerate(copy.deepcopy(pair.plain))  # its slots hold nothing of this text
    got = stranger.generate(text, past_key_values=copy.deepcopy(out.past_key_values), max_new_tokens=12)
    assert lookfar.last_stats(stranger).reused_tokens == 17
    same(pair.plain.generate(text, past_key_values=out.past_key_values, max_new_tokens=12), got)


def test_a_cache_of_ones_own_is_filled_in_place(pair: Pair) -> None:
    theirs, ours = (DynamicCache(config=pair.plain.config) for _ in range(2))
    text = one()
    for _ in range(3):
        mask = torch.ones_like(text)
        expected = pair.plain.generate(text, attention_mask=mask, past_key_values=theirs, max_new_tokens=5)
        same(expected, pair.fast.generate(text, attention_mask=mask, past_key_values=ours, max_new_tokens=5))
        assert theirs.get_seq_length() == ours.get_seq_length() == expected.shape[1] - 1
        text = torch.cat([expected, one(3)], -1)
    new = text[:, theirs.get_seq_length() :]  # only what the cache does not hold, with a mask for everything
    mask = torch.ones_like(text)
    expected = pair.plain.generate(new, attention_mask=mask, past_key_values=theirs, max_new_tokens=5)
    same(expected, pair.fast.generate(new, attention_mask=mask, past_key_values=ours, max_new_tokens=5))


def test_a_cache_that_only_holds_a_window_is_for_transformers() -> None:
    both = Pair("mistral")
    out = both.plain.generate(one(30), max_new_tokens=5, return_dict_in_generate=True)
    text = torch.cat([out.sequences, one(4)], -1)
    with pytest.warns(LookfarWarning, match="only a window"):
        got = both.fast.generate(text, past_key_values=copy.deepcopy(out.past_key_values), max_new_tokens=5)
    same(both.plain.generate(text, past_key_values=out.past_key_values, max_new_tokens=5), got)


# What goes to transformers unchanged


def test_other_searches_are_transformers_own(pair: Pair) -> None:
    for arguments in (
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": tiny_model("llama")},
    ):
        torch.manual_seed(1)
        expected = pair.plain.generate(one(), max_new_tokens=9, **arguments)
        torch.manual_seed(1)
        same(expected, pair.fast.generate(one(), max_new_tokens=9, **arguments))
    expected = pair.plain.generate(one(), max_new_tokens=9, num_beams=3)
    same(expected, pair.plain.generate(one(), max_new_tokens=9, num_beams=3, custom_generate=lookfar.generate))
    with pytest.raises(RequestError, match="custom_generate='transformers-community/contrastive-search'"):
        pair.plain.generate(one(), penalty_alpha=0.5, top_k=4, custom_generate=lookfar.generate)
    lookfar.restore(pair.plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("why", "arguments"),
    [
        ("use_cache is off", {"use_cache": False}),
        ("attentions are asked for", {"return_dict_in_generate": True, "output_attentions": True}),
        ("hidden states", {"return_dict_in_generate": True, "output_hidden_states": True}),
        ("classifier-free guidance", {"guidance_scale": 1.5}),
        ("cache type is unsupported", {"cache_implementation": "static", "disable_compile": True}),
        ("position_ids are not the default ones", {"position_ids": torch.arange(12, device=DEVICE)[None] + 3}),
        ("hides more than padding", {"attention_mask": torch.tensor([[1, 0] + [1] * 10], device=DEVICE)}),
        ("longer than the model's positions", {"max_new_tokens": 300}),
    ],
)
def test_what_cannot_be_exact_is_passed_on(pair: Pair, why: str, arguments: dict[str, Any]) -> None:
    arguments = {"max_new_tokens": 6, "eos_token_id": None, **arguments}
    if arguments.get("output_attentions"):
        pair = Pair("llama")
        pair.plain.set_attn_implementation("eager")
        pair.fast.set_attn_implementation("eager")
    pair.passed_on(why, one(), **arguments)


def test_models_that_cannot_verify_trees_are_passed_on() -> None:
    both = Pair("mamba")
    both.passed_on("recurrent", one(), max_new_tokens=6)


def test_errors_of_transformers_stay_its_errors(pair: Pair) -> None:
    for arguments in ({"max_new_tokens": -1}, {"foo": 1}, {"num_return_sequences": 2}, {"max_length": 3}):
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            pair.plain.generate(one(), **arguments)
        with pytest.raises(theirs.type) as ours:
            pair.fast.generate(one(), **arguments)
        assert str(ours.value) == str(theirs.value)


# accelerate and restore


def test_custom_generate_for_one_call(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama)
    expected = model.generate(one(), max_new_tokens=20, pad_token_id=0)
    same(expected, model.generate(one(), max_new_tokens=20, pad_token_id=0, custom_generate=lookfar.generate))
    assert lookfar.last_stats(model).tokens == 20
    for strategy in ("none", "lookahead", lookfar.Suffix()):
        got = model.generate(
            one(), max_new_tokens=20, pad_token_id=0, custom_generate=lookfar.generate, strategy=strategy, budget=8
        )
        same(expected, got)
    assert lookfar.last_stats(model).steps < 20  # by now it has said all this before
    assert type(model) is type(llama)


def test_restore_leaves_no_trace(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama)
    before = set(vars(model))
    fast = lookfar.accelerate(model, strategy="suffix", budget=8)
    assert fast is model
    assert isinstance(model, type(llama))
    assert type(model).__name__ == type(llama).__name__
    assert lookfar.accelerate(model, strategy="lookahead") is model  # again, with another strategy
    model.generate(one(), max_new_tokens=9, pad_token_id=0)
    assert set(lookfar.last_stats(model).drafters) <= {"lookahead"}
    assert lookfar.restore(model) is model
    assert type(model) is type(llama)
    assert set(vars(model)) == before
    lookfar.restore(model)  # twice does no harm


def test_copies_and_pickles_are_plain_models(tmp_path: Any) -> None:
    pair = Pair("llama")
    pair.fast.generate(one(), max_new_tokens=3)
    for other in (copy.deepcopy(pair.fast), pickle.loads(pickle.dumps(pair.fast))):
        assert type(other) is type(pair.plain)
        same(pair.plain.generate(one(), max_new_tokens=9), other.generate(one(), max_new_tokens=9))
    pair.fast.save_pretrained(tmp_path)
    assert type(pair.plain).from_pretrained(tmp_path).config.architectures == [type(pair.plain).__name__]


@pytest.mark.slow
def test_pipelines() -> None:
    tokenizer = byte_tokenizer()
    both = Pair("llama", vocab_size=len(tokenizer))
    chat = [{"role": "user", "content": "Hello there"}]
    for prompt in ("Hello", ["Hello", "A longer text"], chat):
        for arguments in ({"do_sample": False}, {"do_sample": True, "num_return_sequences": 2}):
            texts = []
            for model in (both.plain, both.fast):
                pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
                torch.manual_seed(2)
                texts.append(pipe(prompt, max_new_tokens=15, **arguments))
            assert texts[0] == texts[1]
    assert lookfar.last_stats(both.fast).tokens == 30


def test_a_model_in_training_is_left_alone(llama: PreTrainedModel) -> None:
    model = lookfar.accelerate(copy.deepcopy(llama)).train()
    with pytest.warns(LookfarWarning, match="training mode"):
        model.generate(one(), max_new_tokens=3, pad_token_id=0)
    assert model.training


def test_accelerate_takes_models_only() -> None:
    with pytest.raises(RequestError, match="takes a transformers model that can generate, not str"):
        lookfar.accelerate("gpt2")  # type: ignore[arg-type]
    with pytest.raises(lookfar.LookfarError, match="strateg"):
        lookfar.accelerate(tiny_model("llama"), strategy="magic")


def test_threads_share_a_model(pair: Pair) -> None:
    prompts = [one(5 + i, seed=i) for i in range(6)]
    expected = [pair.plain.generate(p, max_new_tokens=15) for p in prompts]
    got: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        got[i] = pair.fast.generate(prompts[i], max_new_tokens=15)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, tokens in enumerate(expected):
        same(tokens, got[i])


# Everything at once


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `generate`, in any combination that transformers takes."""

    def maybe(**options: Any) -> dict[str, Any]:
        return {k: v for k, v in options.items() if draw(st.booleans())}

    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    arguments: dict[str, Any] = {**padded(*lengths), "max_new_tokens": draw(st.integers(1, 18))}
    arguments |= draw(
        st.sampled_from(
            [
                {"do_sample": False},
                {"do_sample": True, "temperature": 0.5},
                {"do_sample": True, "temperature": 1.5, "top_k": 0},
            ]
        )
    )
    if arguments["do_sample"]:
        arguments |= maybe(top_p=0.8, min_p=0.02, typical_p=0.9, epsilon_cutoff=0.003, num_return_sequences=2)
    arguments |= maybe(
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        min_new_tokens=4,
        bad_words_ids=[[3, 4], [5]],
        suppress_tokens=[8],
        renormalize_logits=True,
        eos_token_id=[20, 21, 22, 23, 24, 25, 26],
        sequence_bias=[[[30], 2.0]],
    )
    if draw(st.booleans()):
        arguments |= {"return_dict_in_generate": True, **maybe(output_scores=True, output_logits=True)}
    return arguments


@pytest.mark.slow
@given(calls(), st.integers(0, 100))
@settings(max_examples=150)
def test_any_combination_of_arguments(pair: Pair, arguments: dict[str, Any], seed: int) -> None:
    pair.both(**arguments, seed=seed)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unfeasible length constraints")
        yield


def test_criteria_get_scores_of_the_shape_that_generate_gives(llama: PreTrainedModel) -> None:
    def shapes(**arguments: Any) -> list[list[torch.Size]]:
        seen: list[list[torch.Size]] = []

        def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            seen.append([one.shape for one in scores])
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids = torch.tensor([random_prompts(9)[0]], device=llama.device)
        kept = {"return_dict_in_generate": True, "output_scores": True}
        llama.generate(ids, max_new_tokens=4, pad_token_id=0, stopping_criteria=[criterion], **kept, **arguments)
        return seen

    assert shapes(custom_generate=lookfar.generate) == shapes()


def test_stop_strings_are_accelerated() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    ids = torch.tensor([random_prompts(9)[0]], device=model.device)
    arguments = {"max_new_tokens": 30, "pad_token_id": 0, "tokenizer": tokenizer}
    text = tokenizer.decode(model.generate(ids, **arguments)[0, 9:])
    arguments["stop_strings"] = [text[len(text) // 2 :][:1]]
    expected = model.generate(ids, **arguments)
    lookfar.accelerate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lookfar.LookfarWarning)
        assert torch.equal(model.generate(ids, **arguments), expected)
    assert lookfar.last_stats(model).steps


# Calls that cannot work fail as they do without lookfar


@pytest.mark.filterwarnings("ignore::lookfar.errors.LookfarWarning")
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(0, 4, dtype=torch.long),
        torch.zeros(1, 0, dtype=torch.long),
        torch.zeros(1, 4),
        torch.zeros(4, dtype=torch.long),
        torch.zeros(1, 2, 3, dtype=torch.long),
        torch.tensor([[5, 500]]),
        torch.tensor([[5, -1]]),
    ],
    ids=["empty batch", "empty prompt", "floats", "1-D", "3-D", "out of vocabulary", "negative"],
)
def test_bad_input_fails_as_in_transformers(pair: Pair, ids: torch.Tensor, do_sample: bool) -> None:
    outcomes = []
    for model in (pair.plain, pair.fast):
        torch.manual_seed(0)
        try:
            outcomes.append(model.generate(ids.to(DEVICE), max_new_tokens=4, do_sample=do_sample).tolist())
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("batch", [1, 2])
def test_logits_that_are_nan(batch: int) -> None:
    both = Pair("llama", dtype=torch.float32)
    with torch.no_grad():
        for model in (both.plain, both.fast):
            model.lm_head.weight[3] = float("nan")
    ids = one().expand(batch, -1)
    both.both(ids, max_new_tokens=5)  # argmax takes NaN for the largest number
    for model in (both.plain, both.fast):
        with pytest.raises(RuntimeError):
            model.generate(ids, max_new_tokens=5, do_sample=True)


def test_reasons_name_the_cause(pair: Pair) -> None:
    nothing = {"input_ids": one().expand(2, -1), "attention_mask": torch.ones(2, 12, dtype=torch.long, device=DEVICE)}
    nothing["attention_mask"][0] = 0
    pair.passed_on("a prompt has no tokens", **nothing, max_new_tokens=3)
    state_of(pair.fast)._warned.clear()
    with warnings.catch_warnings():  # an assistant is not meant to be accelerated: nothing to warn of
        warnings.simplefilter("error", LookfarWarning)
        pair.plain.generate(one(), assistant_model=pair.fast, max_new_tokens=5)
