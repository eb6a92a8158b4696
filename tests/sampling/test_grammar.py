"""Structured output: valid, equal to transformers with the same processor, and drafted where text is forced."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import lookfar
from families import tiny_model
from helpers import byte_tokenizer
from lookfar import LM
from lookfar.errors import RequestError
from lookfar.sampling.grammar import Grammar, GrammarCursor, GrammarProcessor, constrain

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour_of_the_thing": {"enum": ["red", "green"]},
        "confirmed": {"type": "boolean"},
    },
    "required": ["identifier", "colour_of_the_thing", "confirmed"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": r"[A-Z][a-z]{3,6}-[0-9]{4}, signed"},
    {"grammar": 'start: item ("; " item)~2\nitem: "entry number " /[0-9]/ | "nothing to report"'},
]


@pytest.fixture(scope="module")
def lm() -> LM:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", torch.float32, vocab_size=len(tokenizer) + 5)  # more rows than the tokenizer has words
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = 0
    return LM(model, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda c: next(iter(c)))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_k": 0}], ids=["greedy", "sampled"])
def test_the_tokens_of_transformers_with_the_same_constraint(lm: LM, constraint: Any, sampling: Any) -> None:
    ids = torch.tensor([lm.encode("Tell me.")])
    for seed in range(3):
        torch.manual_seed(seed)
        expected = lm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=120,
            do_sample=bool(sampling),
            logits_processor=LogitsProcessorList([constrain(lm.tokenizer, **constraint)]),
            **sampling,
        )[0, ids.shape[1] :].tolist()
        lm.forget()
        # A fixed budget: with an automatic one, speculation may be off for a model as fast as this one.
        done = lm.generate("Tell me.", max_new_tokens=120, seed=seed, budget=32, **constraint, **sampling)
        assert done.token_ids == expected
        assert done.finish_reason == "stop"
        assert done.stats.drafters["grammar"].accepted > 5
        assert done.stats.tokens_per_step > 1.3
        again = lm.generate("Tell me.", max_new_tokens=120, seed=seed, strategy="none", **constraint, **sampling)
        assert again.token_ids == expected
        if "json_schema" in constraint:
            answer = json.loads(done.text)
            assert set(answer) == set(SCHEMA["required"])  # type: ignore[call-overload]
            assert 0 <= answer["identifier"] <= 99
            assert answer["colour_of_the_thing"] in ("red", "green")
        elif "regex" in constraint:
            assert re.fullmatch(constraint["regex"], done.text)
        else:
            assert done.text.count(";") == 2


def test_batches_follow_the_constraint_row_by_row(lm: LM) -> None:
    prompts = ["Tell me.", "And now?", "x"]
    alone = [lm.generate(p, max_new_tokens=99, json_schema=SCHEMA).token_ids for p in prompts]
    together = lm.generate(prompts, max_new_tokens=99, json_schema=SCHEMA)
    assert [done.token_ids for done in together] == alone
    fast = lookfar.accelerate(copy.deepcopy(lm.model), budget=32)
    batch = lm.tokenizer(["Tell me.", "And now?"], return_tensors="pt")
    for do_sample in (False, True):
        outs = []
        for model in (lm.model, fast):
            torch.manual_seed(4)
            processors = LogitsProcessorList([constrain(lm.tokenizer, json_schema=SCHEMA)])
            arguments = {"max_new_tokens": 99, "do_sample": do_sample, "logits_processor": processors}
            outs.append(model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **arguments))
        assert torch.equal(*outs)
    assert lookfar.last_stats(fast).drafters["grammar"].accepted > 10


def test_rows_of_a_batch_that_end_at_different_times(lm: LM) -> None:
    fast = lookfar.accelerate(copy.deepcopy(lm.model))
    batch = lm.tokenizer(["Tell me.", "And now?", "No, yes."], return_tensors="pt")
    for seed in range(4):
        outs = []
        for model in (lm.model, fast):
            torch.manual_seed(seed)
            processors = LogitsProcessorList([constrain(lm.tokenizer, regex="[ab]{1,9}")])
            arguments = {"max_new_tokens": 20, "do_sample": True, "logits_processor": processors}
            outs.append(model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **arguments))
        assert torch.equal(*outs)


def test_a_processor_can_be_used_for_another_prompt(lm: LM) -> None:
    processor = constrain(lm.tokenizer, regex="[0-9]{5}")
    for text in ("A longer prompt.", "Short.", "A prompt that is longer again."):
        done = lm.generate(text, max_new_tokens=20, logits_processor=[processor])
        assert re.fullmatch("[0-9]{5}", done.text)
        ids = torch.tensor([lm.encode(text)])
        out = lm.model.generate(ids, max_new_tokens=20, logits_processor=LogitsProcessorList([processor]))
        assert out[0, ids.shape[1] :].tolist() == done.token_ids


def test_a_cursor_goes_forwards_and_backwards(lm: LM) -> None:
    cursor = GrammarCursor(Grammar.compile(lm.tokenizer, regex="ab(cd|ce)f"))
    read = lm.encode
    assert cursor.move_to([])
    assert cursor.forced() == read("abc")
    assert cursor.move_to(read("abcd"))
    assert cursor.forced()[:1] == read("f")
    assert cursor.move_to(read("ab"))  # back
    assert cursor.allowed().nonzero()[0].tolist() == read("c")
    assert cursor.move_to(read("abce"))  # another branch
    assert not cursor.move_to(read("abx"))  # broken
    assert cursor.move_to(read("abcef"))
    assert not cursor.move_to([*read("abcef"), lm.tokenizer.eos_token_id])  # over


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json_schema": "{"}, "cannot be used"),
        ({"json_schema": {"type": "nothing"}}, "cannot be used"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"regex": "a", "grammar": 'start: "a"'}, "one of json_schema, regex and grammar"),
    ],
)
def test_bad_constraints_are_one_sentence(lm: LM, constraint: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        lm.generate("x", **constraint)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_said(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="needs a fast tokenizer"):
        LM(lm.model).generate([4, 5], regex="a")
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'lookfar\[structured\]'"):
        lm.generate("x", regex="a")


def test_each_row_gets_a_processor_of_its_own(lm: LM) -> None:
    processor = constrain(lm.tokenizer, regex="ab")
    assert isinstance(processor.for_row(1), GrammarProcessor)
    assert processor.for_row(1) is not processor


@pytest.mark.slow
def test_a_constraint_that_becomes_too_complex_is_an_error_and_not_an_end(lm: LM, capfd: Any) -> None:
    """llguidance would say that the text is finished."""
    cursor = GrammarCursor(Grammar.compile(lm.tokenizer, regex=r"(.|..|...|....){0,5000}(.*x.{100}){8}"))
    text = lm.encode("xyabcdx" * 200)

    def follow() -> None:
        for end in range(len(text)):
            assert cursor.move_to(text[:end])
            cursor.allowed()

    with pytest.raises(RequestError, match="too complex"):
        follow()
    assert capfd.readouterr().err == ""
