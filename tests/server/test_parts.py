"""The small parts of the server: stop strings, tool calls, field names of errors, logs, metrics, fallback."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from families import tiny_model
from helpers import byte_tokenizer, wait_until
from live_server import byte_lm, live_server
from lookfar.errors import LookfarWarning
from lookfar.lm import LM
from lookfar.server.config import ServerConfig
from lookfar.server.logs import StructuredFormatter
from lookfar.server.stop_strings import StopTextFilter
from lookfar.server.tools import CallFilter, CallFormat, parse_calls

NAMES = CallFormat(frozenset({"weather", "time"}))


@pytest.mark.parametrize("pieces", [["one STOP two"], list("one STOP two"), ["one S", "TOP", " two"]])
def test_a_stop_string_is_cut_wherever_the_pieces_end(pieces: list[str]) -> None:
    cut = StopTextFilter(["STOP", "never"])
    assert "".join(cut.add(piece) for piece in pieces) + cut.end() == "one "
    assert cut.found


def test_the_beginning_of_a_stop_string_is_given_back_at_the_end() -> None:
    cut = StopTextFilter(["STOP"])
    assert [cut.add("a ST"), cut.add("ST"), cut.end()] == ["a ", "ST", "ST"]
    assert not cut.found


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>', "", ["weather"]),
        ('Let me see. <tool_call>{"name": "time", "arguments": {}}</tool_call>', "Let me see. ", ["time"]),
        ('<tool_call>[{"name": "time", "arguments": {}}, {"name": "weather"}]</tool_call>', "", ["time", "weather"]),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"place": "Rome"}}]', "", ["weather"]),
        ('<|python_tag|>{"name": "weather", "parameters": {"place": "Rome"}}', "", ["weather"]),
        ('{"name": "weather", "parameters": {"place": "Rome"}}', "", ["weather"]),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ("<tool_call>{broken", "<tool_call>{broken", []),
        ("[[[[[[", "[[[[[[", []),
        ("No call.", "No call.", []),
    ],
)
def test_tool_calls_are_found_in_the_forms_that_models_use(text: str, content: str, calls: list[str]) -> None:
    found = parse_calls(text, NAMES)
    assert (found[0], [call["function"]["name"] for call in found[1]]) == (content, calls)
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in found[1])
    held = CallFilter(NAMES)
    shown = "".join(held.add(letter) for letter in text)
    rest, streamed = parse_calls(held.held, NAMES)
    assert (shown + rest, len(streamed)) == (content, len(calls))


def test_required_calls_may_have_schemas_with_references() -> None:
    """pydantic puts nested models under $defs; two tools may have definitions of the same name."""
    shape = {
        "type": "object",
        "properties": {"kind": {"$ref": "#/$defs/kind"}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**shape, "$defs": {"kind": {"const": name}}}}}
        for name in ("one", "two")
    ]
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
    }
    with live_server(byte_lm(), ServerConfig(model_name="tiny")) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["kind"] == call["function"]["name"]


def test_any_text_can_be_a_choice() -> None:
    with live_server(byte_lm(), ServerConfig(model_name="tiny")) as server:
        for text in ("\x7f\x1b", "\\x7f", '"\n', "\u2028ü"):
            body = {"prompt": "A", "structured_outputs": {"choice": [text]}, "max_tokens": 20}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/v1/completions", b"[]", "The body is no JSON object: send one, with"),
        ("/v1/completions", b'{"prompt": "a", "": 1}', "Unknown field '': remove it."),
        ("/v1/completions", b'{"prompt": "a", "' + b"x" * 5000 + b'": 1}', "Unknown field 'xxx"),
        ("/lookfar/status?since=x", None, "since: Input should be a valid number"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"messages": "a"}}',
            "'messages' is not for a chat template.",
        ),
    ],
)
def test_messages_name_what_is_wrong(path: str, content: bytes | None, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    with live_server(byte_lm(), ServerConfig(model_name="tiny")) as server:
        method = "GET" if content is None else "POST"
        answer = httpx.request(method, server.url + path, content=content, headers=headers)
    assert answer.status_code == 400
    found = answer.json()["error"]["message"]
    assert found.startswith(message)
    assert len(found) < 300


def test_logs_are_one_line_as_text_and_as_json() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "request", (), None)
    record.fields = {"id": "1", "path": "/a b", "usage": {"tokens": 3}}
    line = StructuredFormatter("text").format(record)
    assert line.endswith('info request id=1 path="/a b" usage.tokens=3')
    assert json.loads(StructuredFormatter("json").format(record))["usage"] == {"tokens": 3}


def test_metrics_tell_what_happened() -> None:
    with live_server(byte_lm(), ServerConfig(model_name="tiny")) as server:
        body: dict[str, Any] = {"prompt": "the fox and the hen and the fox and the hen", "max_tokens": 12}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60)
        httpx.post(f"{server.url}/v1/completions", json={**body, "n": 0}, timeout=60)
        wait_until(lambda: server.is_idle)
        text = httpx.get(f"{server.url}/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values["lookfar_tokens_total"]) == 24
        assert float(values['lookfar_requests_total{outcome="completed"}']) == 2
        assert float(values['lookfar_http_responses_total{path="/v1/completions",status="400"}']) == 1
        assert float(values["lookfar_time_to_first_token_seconds_count"]) == 1
        assert float(values["lookfar_cached_tokens_total"]) == len(body["prompt"]) - 1  # of the second one
        assert float(values["lookfar_running"]) == float(values["lookfar_waiting"]) == 0
        assert any(name.startswith("lookfar_draft_tokens_total{") for name in values)
        status = httpx.get(f"{server.url}/lookfar/status", params={"since": 1e12}).json()
        assert status["history"] == []
        assert status["now"]["outcomes"] == {"completed": 2}


def test_models_that_transformers_has_to_decode_are_served_too() -> None:
    lm = LM(tiny_model("openai-gpt", vocab_size=258), byte_tokenizer(), strategy="none")
    assert lm.why_request_falls_back(lm.requests("A")[0][0])
    expected = lm.generate("Hello", max_new_tokens=10).text
    with live_server(lm, ServerConfig(model_name="tiny")) as server:
        body = {"prompt": "Hello", "max_tokens": 10}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "n": 2}, timeout=60).json()
        assert [choice["text"] for choice in answer["choices"]] == [expected] * 2
        streamed = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        wait_until(lambda: server.is_idle)


def test_the_reason_for_a_fallback_is_not_a_warning_for_clients(recwarn: pytest.WarningsRecorder) -> None:
    lm = LM(tiny_model("openai-gpt", vocab_size=258), byte_tokenizer())
    with live_server(lm, ServerConfig(model_name="tiny")) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "A", "max_tokens": 2}).status_code == 200
    assert not [w for w in recwarn if issubclass(w.category, LookfarWarning)]
