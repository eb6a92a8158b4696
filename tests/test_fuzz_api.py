"""Random calls of the Python interface: each returns an answer or raises an error of the library, soon.

The inputs are always the same ones; `FUZZ_INPUTS=6000` tries as many others.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import lookfar
from families import tiny_model
from helpers import byte_tokenizer
from lookfar import LM, Completion
from lookfar.errors import LookfarError
from lookfar.options import GenerateOptions

INPUTS = int(os.environ.get("FUZZ_INPUTS", "300"))
CHECKED = settings(
    max_examples=INPUTS,
    derandomize="FUZZ_INPUTS" not in os.environ,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

NUMBERS: list[Any] = [0, 1, 2, 7, -1, 0.5, 1.0, 1.5, 1e-320, 1e308, float("nan"), float("inf"), 10**30, True, False]
OBJECTS: list[Any] = [
    None,
    "",
    "x",
    b"x",
    [],
    [[]],
    (),
    {},
    {"a": 1},
    [1, 2],
    [[1], [2]],
    ["a"],
    object(),
    torch.zeros(2),
]
ANYTHING = st.sampled_from(NUMBERS + OBJECTS)
RIGHT: dict[str, list[Any]] = {
    "strategy": ["auto", "none", "lookahead", "suffix+recycle", "trie", lookfar.Lookahead(window=2)],
    "budget": [None, "auto", 1, 8],
    "temperature": [0, 0.7, 1],
    "top_p": [0.9, 1.0],
    "top_k": [0, 5],
    "seed": [0, 1],
    "stop_strings": [["a"], "b"],
    "eos_token_id": [5, [5, 6]],
    "bad_words_ids": [[[5]], [[5, 6]]],
    "repetition_penalty": [1.2],
    "no_repeat_ngram_size": [2],
    "min_new_tokens": [2],
    "regex": ["[a-z]+"],
    "json_schema": [{"type": "integer"}, '{"type": "string"}'],
    "sequence_bias": [{(5,): 2.0}],
    "forced_eos_token_id": [5],
}
PROMPTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.integers(-2, 300), max_size=9),
    st.lists(st.text(max_size=5), max_size=3),
    st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=3),
    ANYTHING,
)
MESSAGES = st.one_of(
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", 7]), "content": PROMPTS}), max_size=3),
    PROMPTS,
)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Options, most of them of the right kind."""
    options: dict[str, Any] = {"max_new_tokens": draw(st.sampled_from([1, 3, 6, 6, 6]))}
    for name in draw(st.lists(st.sampled_from([*GenerateOptions.__annotations__, "unknown"]), max_size=4)):
        right = st.sampled_from(RIGHT[name]) if name in RIGHT else ANYTHING
        options[name] = draw(st.integers(0, 2).flatmap(lambda chance, right=right: right if chance else ANYTHING))
    return options


@pytest.fixture(scope="module")
def lm() -> LM:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    model = tiny_model("llama", torch.float32, vocab_size=len(tokenizer))
    return LM(model, tokenizer, budget=8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@CHECKED
@given(prompt=PROMPTS, options=calls(), how=st.sampled_from(["generate", "stream", "chat"]), messages=MESSAGES)
def test_any_call_gives_an_answer_or_an_error_of_ours(
    lm: LM, prompt: Any, options: dict[str, Any], how: str, messages: Any
) -> None:
    try:
        if how == "generate":
            done = lm.generate(prompt, **options)
            assert isinstance(done, Completion) or all(isinstance(one, Completion) for one in done)
        elif how == "chat":
            assert isinstance(lm.chat(messages, **options), Completion)
        else:
            with lm.stream(prompt, **options) as stream:
                for _ in stream:
                    pass
    except LookfarError:
        pass
    assert len(lm.generate([1, 2], max_new_tokens=2).token_ids) == 2  # the next one is served
