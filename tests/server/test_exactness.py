"""Answers over HTTP equal those of `LM.generate`: greedy and sampled, streamed and not, many clients at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from live_server import LiveServer, byte_lm, live_server
from lookfar.lm import LM

PROMPTS = ["The fox walks to the river.", "one two three one two three one", "A", "def f(x):\n    return x\n" * 3]
# The fields of a request, and the same as options of `LM.generate`.
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 0.7, "seed": 1}, {"temperature": 0.7, "top_k": 0, "seed": 1}),
    ({"temperature": 1.2, "top_k": 9, "seed": 2}, {"temperature": 1.2, "top_k": 9, "seed": 2}),
    ({"top_p": 0.8, "min_p": 0.05, "seed": 3}, {"top_p": 0.8, "min_p": 0.05, "top_k": 0, "seed": 3}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}),
    ({"logit_bias": {"40": 2.5, "70": -100}}, {"sequence_bias": {(40,): 2.5, (70,): -100.0}}),
    ({"temperature": 0, "lookfar": {"strategy": "none"}}, {"strategy": "none"}),
    ({"structured_outputs": {"regex": "[a-f]{6,30}"}}, {"regex": "[a-f]{6,30}"}),
]


@pytest.fixture(scope="module")
def lm() -> LM:
    return byte_lm()


@pytest.fixture(scope="module")
def server(lm: LM) -> Any:
    with live_server(lm) as running:
        yield running


def ask(server: LiveServer, prompt: str, fields: dict[str, Any], stream: bool) -> tuple[str, str]:
    """The text and the finish reason of a completion."""
    body = {"prompt": prompt, "max_tokens": 24, **fields}
    if not stream:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["text"], choice["finish_reason"]
    text, reason = "", ""
    for chunk in events(server, "/v1/completions", {**body, "stream": True}):
        for choice in chunk["choices"]:
            text, reason = text + choice["text"], choice["finish_reason"] or reason
    return text, reason


def events(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_sixteen_clients_with_different_settings_get_what_generate_returns(lm: LM, server: LiveServer) -> None:
    jobs = [
        (prompt, fields, options, stream)
        for stream in (False, True)
        for prompt in PROMPTS
        for fields, options in SETTINGS
    ]
    expected = [lm.generate(prompt, max_new_tokens=24, **options) for prompt, _, options, _ in jobs[: len(jobs) // 2]]
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda job: ask(server, job[0], job[1], job[3]), jobs))
    assert answers == [(one.text, one.finish_reason) for one in expected] * 2
    assert server.is_idle


def test_answers_of_one_request_have_consecutive_seeds(lm: LM, server: LiveServer) -> None:
    body = {"prompt": PROMPTS[:2], "max_tokens": 12, "n": 3, "temperature": 0.9, "seed": 5}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    expected = [
        lm.generate(prompt, max_new_tokens=12, temperature=0.9, top_k=0, seed=5 + i).text
        for prompt in PROMPTS[:2]
        for i in range(3)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["completion_tokens"] == 6 * 12


def test_answers_without_a_seed_differ(server: LiveServer) -> None:
    body = {"prompt": "A", "max_tokens": 16, "n": 4, "temperature": 1.5}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert len({choice["text"] for choice in answer["choices"]}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(lm: LM, server: LiveServer, stream: bool) -> None:
    prompt = PROMPTS[1]
    answer = lm.generate(prompt, max_new_tokens=48)
    whole, stop = answer.text, answer.text[9:12]
    assert ask(server, prompt, {"max_tokens": 48, "stop": [stop, "not there"]}, stream) == (
        whole[: whole.index(stop)],
        "stop",
    )
    assert ask(server, prompt, {"max_tokens": 48, "stop": "not there"}, stream) == (whole, answer.finish_reason)


def test_chats_equal_chat(lm: LM, server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = lm.chat(messages, max_new_tokens=20)
    body = {"messages": messages, "max_completion_tokens": 20}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    chunks = events(server, "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == expected.text
    used = chunks[-1]["usage"]
    assert used["completion_tokens"] == 20
    assert used["lookfar"]["steps"] <= 20
    body = {"input": "Hello", "instructions": "Be brief.", "max_output_tokens": 20}
    response = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
    assert response["output"][0]["content"][0]["text"] == expected.text


def test_logprobs_are_those_of_the_model(lm: LM, server: LiveServer) -> None:
    import torch

    ids = lm.encode("Hello")
    body = {"prompt": "Hello", "max_tokens": 6, "logprobs": 3, "logit_bias": {"50": 5}, "temperature": 0.8, "seed": 1}
    choice = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    options = {"sequence_bias": {(50,): 5.0}, "temperature": 0.8, "top_k": 0, "seed": 1}
    emitted = lm.generate(ids, max_new_tokens=6, **options).token_ids
    with torch.no_grad():
        logits = lm.model(torch.tensor([ids + emitted])).logits[0, len(ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits, -1)
    expected = [logprobs[i, token].item() for i, token in enumerate(emitted)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    assert best == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)
    streamed = events(server, "/v1/completions", {**body, "stream": True})
    values = [v for chunk in streamed for v in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert values == pytest.approx(expected, abs=1e-4)
