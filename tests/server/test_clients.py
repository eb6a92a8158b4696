"""Clients that people use, against a real server: openai, LangChain's ChatOpenAI, llm, and `lookfar chat --url`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import LiveServer, byte_lm, live_server
from lookfar.lm import LM

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def lm() -> LM:
    return byte_lm()


@pytest.fixture(scope="module")
def server(lm: LM) -> Iterator[LiveServer]:
    with live_server(lm) as running:
        yield running


@pytest.fixture(scope="module")
def expected(lm: LM) -> str:
    return lm.chat(MESSAGES, max_new_tokens=20).text


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Any:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


class TestOpenAI:
    def test_models(self, client: Any) -> None:
        assert [model.id for model in client.models.list()] == ["tiny"]

    def test_chat(self, client: Any, expected: str) -> None:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=20)
        assert answer.choices[0].message.content == expected
        assert answer.usage.completion_tokens == 20
        again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "Go on"}]  # as it came
        client.chat.completions.create(model="tiny", messages=again, max_tokens=4, user="me", extra_body={"top_k": 5})

    def test_streamed_chat(self, client: Any, expected: str) -> None:
        options = {"include_usage": True}
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=20, stream=True, stream_options=options
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
        assert chunks[-1].usage.total_tokens > 20

    def test_completions(self, client: Any, lm: LM) -> None:
        answer = client.completions.create(model="tiny", prompt="A", max_tokens=9, logprobs=1, echo=False)
        expected = lm.generate("A", max_new_tokens=9)
        assert answer.choices[0].text == expected.text
        assert len(answer.choices[0].logprobs.tokens) == len(expected.token_ids)

    def test_responses(self, client: Any, expected: str) -> None:
        answer = client.responses.create(model="tiny", input="Hello", max_output_tokens=20)
        assert answer.output_text == expected
        assert answer.status == "incomplete"
        events = list(client.responses.create(model="tiny", input="Hello", max_output_tokens=20, stream=True))
        assert events[0].type == "response.created"
        assert events[-1].response.output_text == expected
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
        assert [event.sequence_number for event in events] == list(range(len(events)))

    def test_tool_calls(self, client: Any) -> None:
        forced = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", forced):
            fields = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "max_tokens": 400}
            answer = client.chat.completions.create(**fields, parallel_tool_calls=False)
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
            parts = [
                c.choices[0] for c in client.chat.completions.create(**fields, parallel_tool_calls=False, stream=True)
            ]
            (streamed,) = [part.delta.tool_calls for part in parts if part.delta.tool_calls]
            assert streamed[0].function.arguments == call.function.arguments
            assert not any(part.delta.content for part in parts)

    def test_structured_answers(self, client: Any) -> None:
        from pydantic import BaseModel

        class Answer(BaseModel):
            yes: bool

        parsed = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=100)
        assert isinstance(parsed.choices[0].message.parsed, Answer)

    def test_errors(self, client: Any) -> None:
        import openai

        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert missing.value.code == "model_not_found"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_langchain(server: LiveServer, expected: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=20, temperature=0, max_retries=0
    )
    assert model.invoke("Hello").content == expected
    assert "".join(chunk.content for chunk in model.stream("Hello")) == expected
    bound = model.bind_tools([TOOL], tool_choice="weather")
    (call,) = bound.invoke("Hello", max_tokens=400).tool_calls
    assert call["args"]["place"] in ("Rome", "Oslo")


@pytest.mark.slow
def test_llm(server: LiveServer, expected: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    entry = f"- model_id: lookfar\n  model_name: tiny\n  api_base: {server.url}/v1\n  api_key_name: lookfar\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for more in ([], ["--no-stream"]):
        command = [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "lookfar",
            "--key",
            "none",
            "-o",
            "max_tokens",
            "20",
            *more,
            "Hello",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.decode(errors="replace").rstrip("\n") == expected


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with lines typed into it; returns its exit code and what it printed."""
    from lookfar.cli import main

    def run(*words: str, lines: tuple[str, ...] = ()) -> tuple[int, str]:
        typed = iter(lines)

        def read(_: str) -> str:
            for line in typed:
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "argv", ["lookfar", *words])
        monkeypatch.setenv("COLUMNS", "200")
        with warnings.catch_warnings(), pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out + captured.err

    return run


def test_lookfar_chat_with_a_server(server: LiveServer, expected: str, command: Any) -> None:
    lines = ("Hello", "/strategy suffix", "Hello again", "/speed", "/nothing", "/reset", "/speed")
    code, shown = command("chat", "--url", server.url, "--max-new-tokens", "20", lines=lines)
    assert code == 0
    printable = [line for line in expected.split("\n") if line.isprintable() and len(line) > 3]
    assert all(line in shown for line in printable)
    assert shown.count("20 tokens in") >= 3
    assert "strategy: suffix" in shown
    assert "There is no /nothing" in shown


def test_a_chat_names_its_conversation(server: LiveServer, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    asked = httpx.Client.stream

    def stream(self: httpx.Client, *arguments: Any, **options: Any) -> Any:
        seen.append(options["headers"].get("X-Conversation-Id"))
        return asked(self, *arguments, **options)

    monkeypatch.setattr(httpx.Client, "stream", stream)
    for _ in range(2):
        command("chat", "--url", server.url, "--max-new-tokens", "4", lines=("Hello", "Hello again"))
    assert all(seen)
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_lookfar_top(server: LiveServer, command: Any) -> None:
    code, shown = command("top", server.url, "--once")
    assert code == 0
    assert "tiny on cpu" in shown
    assert "tokens per step" in shown
    assert "recycle" in shown  # a drafter


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere", "http://[", ""])
def test_a_server_that_is_not_there_is_one_sentence(url: str, command: Any) -> None:
    for words in (("chat", "--url", url), ("top", url, "--once")):
        code, shown = command(*words)
        assert code == 2
        assert shown.startswith("Error:")
        assert "Traceback" not in shown
