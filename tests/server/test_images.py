"""Images in chat messages: data URLs, the same answers as `lm.chat`, and nothing that is fetched."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from live_server import LiveServer, byte_lm, live_server
from lookfar.lm import LM
from test_inputs import llava, picture, question


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(*llava(), budget=8)


@pytest.fixture(scope="module")
def server(lm: LM) -> Iterator[LiveServer]:
    with live_server(lm) as running:
        yield running


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def body_of(text: str, *urls: str, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 12, **fields}


def ask(server: LiveServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def test_answers_about_images_equal_those_of_chat(lm: LM, server: LiveServer) -> None:
    for seed in (1, 2):
        expected = lm.chat(question("What is it?", picture(seed)), max_new_tokens=12)
        answer = ask(server, body_of("What is it?", data_url(picture(seed)))).json()
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert answer["usage"]["prompt_tokens"] > len("What is it?")
    sampled = {"temperature": 0.9, "seed": 3, "stream": True, "n": 2, "logprobs": True}
    assert ask(server, body_of("What is it?", data_url(picture(1)), **sampled)).text.count("[DONE]") == 1
    expected = lm.chat([{"role": "user", "content": "Only text"}], max_new_tokens=12)
    assert ask(server, body_of("Only text")).json()["choices"][0]["message"]["content"] == expected.text
    assert server.is_idle


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/a.png",
        "file:///etc/passwd",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,!",
        "",
    ],
)
def test_images_that_cannot_be_used_are_refused(server: LiveServer, url: str) -> None:
    answer = ask(server, body_of("What is it?", url))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"


def test_images_are_limited_in_size(server: LiveServer) -> None:
    answer = ask(server, body_of("What is it?", data_url(Image.new("1", (5000, 5000)))))
    assert answer.status_code == 400
    assert "pixels" in answer.json()["error"]["message"]


def test_models_without_images_refuse_them() -> None:
    with live_server(byte_lm()) as server:
        answer = ask(server, body_of("What is it?", data_url(picture(1))))
        assert answer.status_code == 400
        assert "takes no images" in answer.json()["error"]["message"]
