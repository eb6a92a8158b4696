"""Keys, hosts, limits, and what errors give away."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import LiveServer, byte_lm, live_server
from lookfar.errors import ConfigError
from lookfar.lm import LM
from lookfar.server.config import Limits, ServerConfig
from lookfar.server.gate import host_name
from lookfar.server.keys import ApiKeys, Tenant, load_keys

CLOSED = ["/v1/models", "/metrics", "/lookfar/status", "/openapi.json"]


@pytest.fixture(scope="module")
def lm() -> LM:
    return byte_lm()


@pytest.fixture(scope="module")
def open_server(lm: LM) -> Any:
    limits = Limits(
        body_bytes=20_000, body_seconds=0.3, prompts=2, n=3, answers=5, stops=2, stop_length=8, schema_bytes=500
    )
    config = ServerConfig(model_name="tiny", limits=limits, allowed_hosts=("127.0.0.1",))
    with live_server(lm, config) as running:
        yield running


@pytest.fixture(scope="module")
def keyed_server(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("keys") / "keys"
    digest = hashlib.sha256(b"bobs-key").hexdigest()
    file.write_text(f"# tenants\nalice alices-key remember=false\n\nbob sha256:{digest} namespace=team priority=-5\n")
    with live_server(lm, ServerConfig(model_name="tiny"), load_keys(file, "shared-key")) as running:
        yield running


def complete(server: LiveServer, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.post(f"{server.url}/v1/completions", json={"max_tokens": 4, **body}, headers=headers, timeout=60)


@pytest.mark.parametrize("key", [None, "wrong", "Alices-key", "alices-key2"])
def test_without_a_key_nothing_is_answered(keyed_server: LiveServer, key: str | None) -> None:
    assert complete(keyed_server, key, prompt="A").status_code == 401
    for path in CLOSED:
        refused = httpx.get(keyed_server.url + path)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    for path in ("/", "/health", "/version"):
        assert httpx.get(keyed_server.url + path).status_code == 200


@pytest.mark.parametrize("key", ["alices-key", "bobs-key", "shared-key"])
def test_keys_may_be_plain_hashed_or_from_the_environment(keyed_server: LiveServer, key: str) -> None:
    assert complete(keyed_server, key, prompt="A").status_code == 200


def test_tenants_draft_from_their_own_answers_only(keyed_server: LiveServer, lm: LM) -> None:
    def drafted(key: str) -> dict[str, Any]:
        body = {"prompt": "tell me of the fox", "max_tokens": 40, "ignore_eos": True}
        used = complete(keyed_server, key, **body).json()["usage"]
        return used["lookfar"]["drafters"]

    lm.store.learn("tell me of the fox and the hen")  # of the shared namespace
    assert "store" not in drafted("bobs-key")
    assert "store" in drafted("bobs-key")
    for _ in range(2):  # nothing of alice is remembered
        assert "store" not in drafted("alices-key")
    assert "store" in drafted("shared-key")


def test_key_files_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for line in (
        "alice",
        "al!ce key",
        "alice key color=red",
        "alice key remember=no",
        "a sha256:12",
        "a k namespace=/",
    ):
        file.write_text(line)
        with pytest.raises(ConfigError, match="line 1"):
            load_keys(file, "")
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no keys"):
        load_keys(file, "")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(tmp_path / "none", "")
    assert not load_keys(None, "").required
    assert ApiKeys().tenant(None) == Tenant("anyone")


@pytest.mark.parametrize(
    ("text", "said"),
    [("alice key\nbob key\n", "line 2: alice has this key"), ("alice schlüssel", "ASCII"), ("alice", "line 1")],
)
def test_keys_that_could_never_be_used_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load_keys(file, "")


def test_key_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice key", encoding="utf-8-sig")
    assert load_keys(file, "").tenants == [Tenant("alice", "alice")]


def test_host_names_lose_their_port_and_brackets() -> None:
    names = {"[::1]:8000": "::1", "[::1]": "::1", "LocalHost:80": "localhost", "localhost": "localhost", "a:b": ""}
    assert {given: host_name(given) for given in names} == names


def test_other_host_names_are_refused(open_server: LiveServer) -> None:
    """A page of another site that has its name resolve to this machine must not reach the server."""
    for host, status in (("evil.example", 421), ("127.0.0.1", 200), ("127.0.0.1:99", 200), ("", 421)):
        assert httpx.get(f"{open_server.url}/v1/models", headers={"Host": host}).status_code == status


def test_other_origins_are_not_allowed_by_default(open_server: LiveServer, lm: LM) -> None:
    headers = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{open_server.url}/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in answer.headers
    with live_server(lm, ServerConfig(cors_origins=("https://other.example",))) as server:
        answer = httpx.options(f"{server.url}/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://other.example"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 3}, "prompt"),
        ({"prompt": "a", "n": 4}, "n"),
        ({"prompt": ["a", "b"], "n": 3}, "n"),
        ({"prompt": "a", "stop": ["a", "b", "c"]}, "stop"),
        ({"prompt": "a", "stop": "x" * 9}, "stop"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "lookfar": {"budget": 500}}, "lookfar.budget"),
        ({"prompt": "a", "lookfar": {"strategy": "draft_model"}}, "lookfar.strategy"),
        ({"prompt": "a", "structured_outputs": {"regex": "a" * 2000}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": "((a{99}){99}){99}"}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"json": {"const": "x" * 600}}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": r"(\\{999}){999}"}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": "["}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"grammar": "start: /(a{999}){999}/"}}, "structured_outputs"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
            "response_format",
        ),
        ({"prompt": "a", "structured_outputs": {"json": {"$ref": "http://x/y"}}}, "structured_outputs"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": "a", "seed": 1 << 63}, "seed"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ],
)
def test_requests_beyond_the_limits_are_refused(open_server: LiveServer, body: dict[str, Any], param: str) -> None:
    answer = complete(open_server, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_counted_repetitions_that_cost_little_are_taken(open_server: LiveServer) -> None:
    uuid = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    answer = complete(open_server, prompt="a", structured_outputs={"regex": uuid}, max_tokens=36)
    assert re.fullmatch(uuid, answer.json()["choices"][0]["text"])


def test_prompts_that_cannot_fit_are_refused_before_they_are_read(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LM, "encode", lambda *_: pytest.fail("the prompt was read"))
    monkeypatch.setattr(LM, "template_ids", lambda *_: pytest.fail("the prompt was read"))
    long = "a" * 1_000_000
    with live_server(lm, ServerConfig(model_name="tiny")) as server:
        messages = [{"role": "user", "content": long}]
        for path, body in (("completions", {"prompt": long}), ("chat/completions", {"messages": messages})):
            answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_half_characters_are_refused(open_server: LiveServer) -> None:
    for field in ("regex", "grammar"):
        content = b'{"prompt": "a", "structured_outputs": {"%s": "[\\ud800]"}}' % field.encode()
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{open_server.url}/v1/completions", content=content, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"', "[Infinity]"])
def test_metadata_that_cannot_be_sent_back_is_refused(open_server: LiveServer, value: str) -> None:
    content = f'{{"input": "a", "max_output_tokens": 1, "metadata": {{"a": {value}}}}}'.encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{open_server.url}/v1/responses", content=content, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_bodies_are_limited_with_and_without_a_length(open_server: LiveServer) -> None:
    large = json.dumps({"prompt": "a" * 30_000}).encode()
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{open_server.url}/v1/completions", content=large, headers=headers).status_code == 413
    pieces = (large[i : i + 1000] for i in range(0, len(large), 1000))
    assert httpx.post(f"{open_server.url}/v1/completions", content=pieces, headers=headers).status_code == 413


def test_a_body_that_never_comes_is_not_waited_for(open_server: LiveServer) -> None:
    host, port = open_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in client.recv(4096).splitlines()[0]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"a"', b"[" * 10_000, b'{"prompt": NaN}', b"1" * 5000, b"\xff", b'{"a": "\\ud800"}'],
)
def test_malformed_bodies_are_answered_with_400(open_server: LiveServer, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{open_server.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_bodies_that_other_sites_could_send_are_refused(open_server: LiveServer, kind: str) -> None:
    body = json.dumps({"prompt": "A"}).encode()
    answer = httpx.post(f"{open_server.url}/v1/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code in (400, 415)


def test_answers_carry_ids_and_headers(open_server: LiveServer) -> None:
    answer = httpx.get(f"{open_server.url}/health", headers={"X-Request-Id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1"
    assert answer.headers["x-content-type-options"] == "nosniff"
    answer = httpx.get(f"{open_server.url}/health", headers={"X-Request-Id": "no good"})
    assert answer.headers["x-request-id"] != "no good"
    assert "default-src 'none'" in httpx.get(open_server.url).headers["content-security-policy"]
