"""The public surface: prompts of every kind, completions, and one sentence for every mistake."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import lookfar
from families import tiny_model
from helpers import byte_tokenizer, random_prompts, reference
from lookfar.errors import CapacityError, ConfigError, ModelError, RequestError

PROMPTS = random_prompts(12, 30, 5)
NEW = 16


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def lm(tokenizer: PreTrainedTokenizerFast) -> lookfar.LM:
    return lookfar.LM(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)


def test_the_surface_is_what_it_says() -> None:
    main = {"LM", "Chunk", "Completion", "DraftStore", "Share", "Stats", "StepOutput", "Stream"}
    main |= {"__version__", "bench", "load"}
    dropin = {"accelerate", "constrain", "generate", "last_stats", "refresh", "restore"}
    strategies = {"DraftModel", "Jacobi", "Lookahead", "Mtp", "PromptLookup", "Recycle", "Suffix", "Trie"}
    drafters = {"DraftContext", "Drafter", "HiddenRows", "Outcome", "Predictions", "Proposal", "Strategy", "register"}
    errors = {"CapacityError", "ConfigError", "DemoError", "LookfarError", "LookfarWarning", "ModelError"}
    errors |= {"RankError", "RequestError", "StoreError"}
    assert set(lookfar.__all__) == main | dropin | strategies | drafters | errors
    assert all(getattr(lookfar, name) is not None for name in lookfar.__all__)
    assert dir(lookfar) == sorted(lookfar.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lade'"):
        _ = lookfar.Lade


def test_text_ids_and_lists_of_either(lm: lookfar.LM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("hello").input_ids
    one = lm.generate("hello", max_new_tokens=NEW)
    assert one.token_ids == reference(lm.model, ids, NEW)
    assert one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert one.finish_reason == "length"
    assert lm.generate(ids, max_new_tokens=NEW).token_ids == one.token_ids
    assert lm.generate(np.array(ids), max_new_tokens=NEW).token_ids == one.token_ids  # type: ignore[call-overload]
    assert lm.generate(torch.tensor(ids), max_new_tokens=NEW).token_ids == one.token_ids  # type: ignore[call-overload]
    many = lm.generate(["hello", "a longer prompt"], max_new_tokens=NEW)
    assert isinstance(many, list)
    assert many[0].token_ids == one.token_ids
    mixed = lm.generate([ids, tokenizer("a longer prompt").input_ids], max_new_tokens=NEW)
    assert [done.token_ids for done in mixed] == [done.token_ids for done in many]
    rows = lm.generate(torch.tensor([ids, ids]), max_new_tokens=NEW)  # type: ignore[call-overload]
    assert [done.token_ids for done in rows] == [one.token_ids] * 2


def test_chat_applies_the_template(lm: lookfar.LM, tokenizer: PreTrainedTokenizerFast) -> None:
    done = lm.chat([{"role": "user", "content": "hi"}], max_new_tokens=NEW)
    assert done.token_ids == reference(lm.model, tokenizer("user: hi\nassistant:").input_ids, NEW)


def test_strategy_per_call_and_per_lm(lm: lookfar.LM) -> None:
    plain = lm.generate("abc abc abc", max_new_tokens=NEW, strategy="none")
    assert plain.stats.drafters == {}
    fast = lm.generate("abc abc abc", max_new_tokens=NEW, strategy=lookfar.Lookahead(window=3, ngram=3, guesses=3))
    assert fast.token_ids == plain.token_ids
    assert fast.stats.drafters["lookahead"].proposed > 0
    jacobi = lookfar.LM(lm.model, strategy="jacobi").generate(PROMPTS[0], max_new_tokens=NEW)
    assert set(jacobi.stats.drafters) == {"jacobi"}
    assert jacobi.text == ""  # there is no tokenizer


def test_stats_are_counts_and_their_ratios(lm: lookfar.LM) -> None:
    stats = lm.generate("abc", max_new_tokens=NEW, strategy="lookahead").stats
    assert stats.tokens == NEW == sum(stats.step_sizes)
    assert stats.steps == len(stats.step_sizes)
    assert stats.tokens_per_step == NEW / stats.steps
    assert stats.rows_per_step == stats.rows / stats.steps
    assert stats.prompt_tokens == 3
    assert stats.seconds > 0
    assert 0 < stats.host_seconds < stats.seconds
    assert stats.tokens_per_second == NEW / stats.seconds
    assert json.loads(json.dumps(stats.as_dict()))["drafters"]["lookahead"]["proposed"] >= 0


def test_stop_ids_come_from_the_generation_config(lm: lookfar.LM) -> None:
    tokens = reference(lm.model, PROMPTS[0], NEW)
    lm.model.generation_config.eos_token_id = [tokens[4], 1]
    try:
        expected = reference(lm.model, PROMPTS[0], NEW)
        done = lm.generate(PROMPTS[0], max_new_tokens=NEW)
    finally:
        lm.model.generation_config.eos_token_id = None
    assert done.token_ids == expected
    assert done.finish_reason == "stop"


@pytest.mark.parametrize(
    "asked",
    [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}, {"suppress_tokens": [5, 6]}],
)
def test_processors_of_the_generation_config_are_applied(lm: lookfar.LM, asked: dict[str, Any]) -> None:
    config = lm.model.generation_config
    config.eos_token_id = reference(lm.model, PROMPTS[0], NEW)[3]
    before = {name: getattr(config, name) for name in asked}
    config.update(**asked)
    try:
        expected = [reference(lm.model, prompt, NEW) for prompt in PROMPTS]
        for strategy in ("none", "jacobi", "lookahead"):
            done = lm.generate(PROMPTS, max_new_tokens=NEW, strategy=strategy)
            assert [one.token_ids for one in done] == expected
    finally:
        config.update(eos_token_id=None, **before)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, RequestError, "The prompt is empty"),
        ([], {}, RequestError, "The prompt is empty"),
        (["fine", ""], {}, RequestError, "The prompt is empty"),
        ("x" * 250, {"max_new_tokens": 10}, CapacityError, "250 tokens .* 260 do not fit in 256"),
        ("x", {"max_new_tokens": 0}, RequestError, "max_new_tokens must be a whole number of at least 1, not 0"),
        ("x", {"max_new_tokens": -3}, RequestError, "not -3"),
        ("x", {"max_new_tokens": 2.5}, RequestError, "not 2.5"),
        ("x", {"max_new_tokens": True}, RequestError, "not True"),
        ([3, 9999], {}, RequestError, "Token id 9999 is outside the vocabulary: ids go from 0 to 257"),
        ([-1], {}, RequestError, "Token id -1 is outside"),
        (7, {}, RequestError, "A prompt is a text, a list of token ids"),
        ([3.5], {}, RequestError, "A list of prompts holds"),
        ([["a"]], {}, RequestError, "A list of token ids holds whole numbers"),
        ("x", {"strategy": "magic"}, ConfigError, "Unknown strategy 'magic'"),
    ],
)
def test_bad_requests(lm: lookfar.LM, prompt: Any, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        lm.generate(prompt, **options)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, lookfar.LookfarError)
    assert "\n" not in str(caught.value)


def test_bad_chats(lm: lookfar.LM, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RequestError, match="chat takes a list of messages"):
        lm.chat([])
    with pytest.raises(RequestError, match="chat takes a list of messages"):
        lm.chat([{"text": "hi"}])
    with pytest.raises(RequestError, match="needs a tokenizer"):
        lookfar.LM(lm.model).chat([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="needs a tokenizer"):
        lookfar.LM(lm.model).generate("hi")
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        lookfar.LM(lm.model, bare).chat([{"role": "user", "content": "hi"}])


def test_lm_takes_a_model() -> None:
    with pytest.raises(ModelError, match=r"use lookfar\.load"):
        lookfar.LM("demo")  # type: ignore[arg-type]


def test_two_threads_take_turns(lm: lookfar.LM) -> None:
    expected = [reference(lm.model, prompt, NEW) for prompt in PROMPTS]
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        got[i] = lm.generate(PROMPTS[i], max_new_tokens=NEW).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(PROMPTS))] == expected


class OwnLlama(LlamaForCausalLM):
    """A model that is not part of transformers but behaves."""


class DeafLlama(LlamaForCausalLM):
    """A model that ignores the mask it is given."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        return super().forward(input_ids, None, position_ids, past_key_values, **kwargs)


@pytest.mark.parametrize(("kind", "trees"), [(OwnLlama, True), (DeafLlama, False)])
def test_code_from_elsewhere_is_probed_before_it_is_trusted(llama: PreTrainedModel, kind: type, trees: bool) -> None:
    model = kind(llama.config).to(torch.float64).eval()
    model.load_state_dict(llama.state_dict())
    model.generation_config.eos_token_id = None
    lm = lookfar.LM(model)
    assert lm.engine.runner.model.support.trees is trees
    expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    if trees:
        done = lm.generate(PROMPTS, max_new_tokens=NEW)
    else:
        with pytest.warns(UserWarning, match="does not follow the mask"):
            done = lm.generate(PROMPTS, max_new_tokens=NEW)
    assert [one.token_ids for one in done] == expected


@pytest.fixture
def saved(tmp_path: Path, lm: lookfar.LM, tokenizer: PreTrainedTokenizerFast) -> Path:
    lm.model.to(torch.float32).save_pretrained(tmp_path / "model")
    lm.model.to(torch.float64)
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_load_a_directory(saved: Path) -> None:
    lm = lookfar.load(str(saved), dtype="float32", max_length=100, strategy="none")
    assert lm.model.dtype == torch.float32
    assert lm.engine.max_length == 100
    assert lm.generate("hello", max_new_tokens=4).stats.steps == 4


@pytest.mark.slow
def test_load_sharded_with_offloaded_layers(saved: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = lookfar.load(str(saved))
    expected = [reference(whole.model, prompt, NEW) for prompt in PROMPTS]
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
    model = LlamaForCausalLM.from_pretrained(saved, device_map=places, offload_folder=tmp_path / "offload")
    done = lookfar.LM(model, tokenizer).generate(PROMPTS, max_new_tokens=NEW)
    assert [one.token_ids for one in done] == expected


def test_bad_models(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="is a directory without a config.json"):
        lookfar.load(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="does not exist"):
        lookfar.load(str(tmp_path / "nowhere"))
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        lookfar.load(str(saved))
    assert "\n" not in str(caught.value)
    (saved / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="not a model that transformers can find"):
        lookfar.load(str(saved))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float13"}, "Unknown dtype 'float13'"),
        ({"device": "gpu"}, "Device 'gpu' is not available"),
        ({"strategy": "magic"}, "Unknown strategy"),
        ({"max_batch": 0}, "max_batch must be"),
    ],
)
def test_bad_load_options(saved: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lookfar.load(str(saved), **options)


def test_a_model_without_a_text_head_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig().to_dict() | {"model_type": "vit"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no language model"):
        lookfar.load(str(tmp_path))


def test_a_model_without_a_generate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = lookfar.LM(model).generate([5, 6, 7], max_new_tokens=9).token_ids
    monkeypatch.setattr(type(model), "can_generate", classmethod(lambda cls: False))
    assert lookfar.LM(model).generate([5, 6, 7], max_new_tokens=9).token_ids == expected
    for name, value in {"temperature": 0.5, "regex": "a", "logits_processor": [print]}.items():
        with pytest.raises(RequestError, match=f"{name} needs a model with a generate method"):
            lookfar.LM(model).generate([5, 6, 7], **{name: value})


def test_prompts_as_a_tokenizer_returns_them(lm: lookfar.LM, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["hello there", "hi"]
    expected = [done.token_ids for done in lm.generate(texts, max_new_tokens=5)]
    assert lm.generate(tokenizer(texts[0]), max_new_tokens=5).token_ids == expected[0]
    assert lm.generate(dict(tokenizer(texts[0])), max_new_tokens=5).token_ids == expected[0]
    tokenizer.pad_token = "</s>"
    tokenizer.padding_side = "left"
    padded = tokenizer(texts, padding=True, return_tensors="pt")
    assert padded.attention_mask.min() == 0
    assert [done.token_ids for done in lm.generate(padded, max_new_tokens=5)] == expected
    assert [done.token_ids for done in lm.generate(tuple(texts), max_new_tokens=5)] == expected
    assert lm.generate(tuple(tokenizer(texts[1]).input_ids), max_new_tokens=5).token_ids == expected[1]


@pytest.mark.parametrize("prompt", [{"a": 1}, b"bytes", {1, 2}, iter([1, 2]), None, 7, object()])
def test_other_things_are_no_prompts(lm: lookfar.LM, prompt: object) -> None:
    with pytest.raises(lookfar.RequestError, match="A prompt is a text, a list of token ids, or a list of those, not"):
        lm.generate(prompt, max_new_tokens=5)  # type: ignore[call-overload]


def test_a_mask_of_another_shape_is_refused(lm: lookfar.LM) -> None:
    with pytest.raises(lookfar.RequestError, match="attention_mask must have the shape of input_ids"):
        lm.generate({"input_ids": [5, 6, 7], "attention_mask": [1, 1]}, max_new_tokens=5)  # type: ignore[call-overload]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": INF}, "temperature must be a finite number, not inf"),
        ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ({"top_p": 2.0}, "top_p must be above 0 and at most 1, not 2.0"),
        ({"top_p": NAN}, "top_p must be a finite number"),
        ({"presence_penalty": NAN}, "presence_penalty must be a finite number"),
        ({"frequency_penalty": "a"}, "frequency_penalty must be a number, not 'a'"),
        ({"stop_strings": [""]}, "stop_strings holds an empty text"),
        ({"bad_words_ids": [[]]}, "bad_words_ids holds an empty list"),
        ({"do_sample": True, "seed": 1 << 70}, "seed must fit into 64 bits"),
    ],
)
def test_values_without_a_meaning_are_refused(lm: lookfar.LM, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(lookfar.RequestError, match=sentence):
        lm.generate("hello", max_new_tokens=3, **options)


def test_half_a_character_is_refused(lm: lookfar.LM) -> None:
    for call in (lambda: lm.generate("a\ud800"), lambda: lm.chat([{"role": "user", "content": "a\ud800"}])):
        with pytest.raises(lookfar.RequestError, match="half a character at position"):
            call()


@pytest.mark.parametrize(
    "messages", ["hello", [1], [{"role": "user"}], [{"role": "user", "content": None}], {"role": "user"}, []]
)
def test_messages_of_another_form_are_refused(lm: lookfar.LM, messages: Any) -> None:
    with pytest.raises(lookfar.RequestError, match="chat takes a list of messages like"):
        lm.chat(messages)


def test_text_parts_of_messages_are_joined(lm: lookfar.LM) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert lm.chat_text([{"role": "user", "content": parts}]) == lm.chat_text(
        [{"role": "user", "content": "Hello there"}]
    )
    with pytest.raises(lookfar.RequestError, match="or parts like"):
        lm.chat([{"role": "user", "content": [{"type": "image", "url": "x"}]}])
