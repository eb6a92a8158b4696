"""Queues, deadlines, disconnects, failures and shutdown: nothing is left behind, and nobody else is affected."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from helpers import wait_until
from live_server import LiveServer, byte_lm, live_server, slow_down
from lookfar.lm import LM
from lookfar.server.admission import AHEAD, Admission
from lookfar.server.config import ServerConfig
from lookfar.server.errors import ApiError
from lookfar.server.service import Service

LONG = {"prompt": "A long story:", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def lm() -> LM:
    return byte_lm(max_batch=2)


@pytest.fixture
def server(lm: LM) -> Any:
    with live_server(lm, ServerConfig(model_name="tiny", max_queue=2)) as running:
        yield running


def post(server: LiveServer, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(
    server: LiveServer, lm: LM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(lm, monkeypatch)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(lm.engine.scheduler.running) == 1)
    steps = lm.engine.counts.steps
    wait_until(lambda: server.is_idle, 2)
    assert lm.engine.counts.steps - steps < 40  # of 400
    assert server.service.metrics.outcomes == {"cancelled": 1}


def test_a_full_queue_refuses_with_a_time_to_come_back(
    server: LiveServer, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(lm, monkeypatch)
    places, body = server.service.admission.places, {**LONG, "max_tokens": 60}
    with ThreadPoolExecutor(places + 2) as clients:
        answers = [clients.submit(post, server, **body) for _ in range(places + 2)]
        wait_until(lambda: server.service.admission.waiting == 2)
        refused = post(server, **body)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["Retry-After"]) >= 1
        assert [answer.result().status_code for answer in answers] == [200] * (places + 2)
    assert server.is_idle


def test_requests_time_out(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(lm, monkeypatch)
    with live_server(lm, ServerConfig(model_name="tiny", request_timeout=0.3)) as server:
        with ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(lambda _: post(server, **LONG), range(6)))  # four run and two wait
        assert [answer.status_code for answer in answers] == [504] * 6
        assert answers[0].json()["error"]["type"] == "timeout_error"
        streamed = post(server, **LONG, stream=True).text.strip().split("\n\n")
        assert json.loads(streamed[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert streamed[-1] == "data: [DONE]"
        wait_until(lambda: server.is_idle)
        assert server.service.metrics.outcomes == {"timeout": 7}


def test_a_failing_request_does_not_touch_others(
    server: LiveServer, lm: LM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lookfar.server.stop_strings import StopTextCriterion

    expected = lm.generate("A", max_new_tokens=30).text

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("/a/secret/path")

    monkeypatch.setattr(StopTextCriterion, "__call__", fail)
    with ThreadPoolExecutor(4) as clients:
        good = [clients.submit(post, server, prompt="A", max_tokens=30) for _ in range(2)]
        bad = clients.submit(post, server, prompt="A", max_tokens=30, stop="x").result()
        streamed = clients.submit(post, server, prompt="A", max_tokens=30, stop="x", stream=True).result()
    assert bad.status_code == 500
    assert "secret" not in bad.text + streamed.text
    assert '"type":"server_error"' in streamed.text
    assert "secret" in caplog.text  # the log has it
    assert [answer.result().json()["choices"][0]["text"] for answer in good] == [expected] * 2
    assert server.is_idle


def test_a_slow_reader_is_paused_and_gets_everything(lm: LM) -> None:
    with live_server(lm, ServerConfig(model_name="tiny", stream_interval=0)) as server:  # one event for each step
        read_slowly(lm, server)


def read_slowly(lm: LM, server: LiveServer) -> None:
    expected = lm.generate(LONG["prompt"], max_new_tokens=400, eos_token_id=257, strategy="none").text
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": True, "lookfar": {"strategy": "none", "trace": True}}).encode()
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(lm.engine.scheduler.paused) == 1)
        assert post(server, prompt="B", max_tokens=20).status_code == 200  # not held up
        received = b""
        while part := client.recv(65536):
            received += part
    lines = [line for line in received.decode().splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)
    assert text == expected
    wait_until(lambda: server.is_idle)


def test_shutdown_finishes_running_requests_and_refuses_new_ones(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(lm, monkeypatch)
    with live_server(lm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.get("/health")  # a connection that is kept
        answers: list[httpx.Response] = []
        running = threading.Thread(target=lambda: answers.append(post(server, **{**LONG, "max_tokens": 60})))
        running.start()
        wait_until(lambda: len(lm.engine.scheduler.running) == 1)
        server.service.drain()
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=LONG).status_code == 503
        server.server.should_exit = True
        running.join(30)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 60


def test_clients_take_turns_and_priorities_come_first() -> None:
    async def run() -> list[str]:
        admission = Admission(1, max_queue=100)
        order: list[str] = []

        async def request(client: str, priority: int) -> None:
            await admission.enter(client, priority, 1, 10)
            order.append(f"{client}{priority}")
            await asyncio.sleep(0)
            admission.leave(1)

        for _ in range(1 + AHEAD):
            await admission.enter("first", 0, 1, 10)
        tasks = [asyncio.create_task(request("greedy", 0)) for _ in range(4)]
        tasks += [asyncio.create_task(request("modest", 0)), asyncio.create_task(request("urgent", -1))]
        await asyncio.sleep(0)
        tasks[3].cancel()  # one that waits
        await asyncio.sleep(0)
        admission.leave(1)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.active == AHEAD
        assert admission.waiting == 0
        assert not admission._queues
        return order

    assert asyncio.run(run()) == ["urgent-1", "greedy0", "modest0", "greedy0", "greedy0"]


def test_a_request_that_leaves_just_before_it_would_be_let_in_is_passed_over() -> None:
    async def run() -> None:
        admission = Admission(1, max_queue=9)
        for _ in range(1 + AHEAD):
            await admission.enter("a", 0, 1, 10)
        waiting = [asyncio.create_task(admission.enter(client, 0, 1, 10)) for client in "bbc"]
        await asyncio.sleep(0)
        waiting[0].cancel()  # its task has not run yet when a place becomes free
        admission.leave(1)
        await asyncio.gather(*waiting[:1], return_exceptions=True)
        await waiting[2]
        assert (admission.active, admission.waiting) == (1 + AHEAD, 1)
        admission.leave(1)
        await waiting[1]
        assert (admission.active, admission.waiting) == (1 + AHEAD, 0)
        assert not admission._queues

    asyncio.run(run())


def test_a_place_is_not_lost_when_a_request_leaves_as_it_is_let_in() -> None:
    async def run() -> None:
        admission = Admission(1, max_queue=1)
        for _ in range(1 + AHEAD):
            await admission.enter("a", 0, 1, 10)
        waiting = asyncio.create_task(admission.enter("b", 0, 1, 10))
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            admission.check(1)
        admission.leave(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert admission.active == AHEAD
        late = asyncio.create_task(admission.enter("c", 0, 1, 0.01))
        await late
        with pytest.raises(TimeoutError):
            await admission.enter("d", 0, 1, 0.01)
        assert (admission.active, admission.waiting) == (1 + AHEAD, 0)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_is_repeated_loses_no_tokens(
    server: LiveServer, lm: LM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = lm.generate("A", max_new_tokens=20, eos_token_id=257).text
    launch, calls = lm.engine.runner.launch, iter(range(1000))

    def fail_once(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("out of memory, for once")
        return launch(*arguments)

    monkeypatch.setattr(lm.engine.runner, "launch", fail_once)
    body = {"prompt": "A", "max_tokens": 20, "n": 2, "ignore_eos": True, "lookfar": {"strategy": "none"}}
    answer = post(server, **body, stream=stream)
    if not stream:
        texts = [choice["text"] for choice in answer.json()["choices"]]
    else:
        texts = ["", ""]
        for line in answer.text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert texts == [expected] * 2
    assert server.is_idle


def test_what_is_left_when_the_draining_is_over_is_told_so(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(lm, monkeypatch, 0.05)
    config = ServerConfig(model_name="tiny", drain_seconds=0.3)
    with live_server(lm, config) as server, ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(post, server, **LONG, stream=i % 2 == 1) for i in range(6)]  # four run and two wait
        wait_until(lambda: server.service.admission.waiting == 2)
        server.server.should_exit = True
        answers = [one.result() for one in asked]
    for answer in answers[::2]:
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
    for answer in answers[1::2]:
        assert answer.status_code == 200
        *_, error, done = answer.text.strip().split("\n\n")
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
    assert server.is_idle


def test_what_was_made_before_is_left_out_of_garbage_collections() -> None:
    """A full collection of half a million objects would stop every stream."""

    async def run() -> int:
        service = Service(byte_lm(max_batch=2), ServerConfig())
        await service.start()
        frozen = gc.get_freeze_count()
        await service.close()
        return frozen

    assert asyncio.run(run()) > 10_000
    assert gc.get_freeze_count() == 0
