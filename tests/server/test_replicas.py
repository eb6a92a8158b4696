"""Replicas behind a reverse proxy: conversations stay, move when a replica ends, and share what was learned."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from fleet import CONFIGS, PROXIES, Proxy, Replica
from helpers import wait_until
from live_server import byte_lm
from redis_server import RedisServer, needs_server

pytestmark = [pytest.mark.slow, needs_server]
CHAT = "/v1/chat/completions"
TAIL = 64  # tokens of a prompt that are stored with its answer


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder, appendonly="yes", appendfsync="always") as server:
        yield server


@pytest.fixture(scope="module")
def replicas(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    folder = tmp_path_factory.mktemp("replicas")
    lm = byte_lm()
    assert lm.tokenizer is not None
    lm.model.save_pretrained(folder / "model")
    lm.tokenizer.save_pretrained(folder / "model")
    started = [Replica(folder / "model", folder, number, redis.url) for number in (1, 2)]
    try:
        for replica in started:
            replica.start()
        for replica in started:
            replica.wait_until_ready()
        yield started
    finally:
        for replica in started:
            replica.kill()


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest, replicas: list[Replica], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    running = Proxy(request.param, tmp_path_factory.mktemp(request.param), replicas)
    running.start()
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.kill()


@pytest.fixture
def name(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """A prefix for conversations and questions, so that no test finds answers of another."""
    return f"{proxy.name} {request.node.originalname}"


def body(*messages: str, **options: Any) -> dict[str, Any]:
    """Return a request; messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    listed = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return {"messages": listed, "max_tokens": 24, "ignore_eos": True, **options}


def ask(url: str, conversation: str | None, **asked: Any) -> dict[str, Any]:
    headers = {"X-Conversation-Id": conversation} if conversation else {}
    response = httpx.post(url + CHAT, json=asked, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def send(proxy: Proxy, replicas: list[Replica], conversation: str | None, **asked: Any) -> tuple[int, Any]:
    """Send a request; returns the index of the replica that answered, and its answer."""
    before = [replica.answered for replica in replicas]
    headers = {"X-Conversation-Id": conversation} if conversation else {}
    answer = httpx.post(proxy.url + CHAT, json=asked, headers=headers, timeout=60).json()
    wait_until(lambda: sum(replica.answered for replica in replicas) > sum(before))
    (place,) = [i for i, replica in enumerate(replicas) if replica.answered > before[i]]
    return place, answer


def test_a_conversation_stays_and_others_spread(proxy: Proxy, replicas: list[Replica], name: str) -> None:
    places = []
    for number in range(10):
        first, conversation = f"{number} {name}: a question with some words in it", f"{name} {number}"
        one, said = send(proxy, replicas, conversation, **body(first))
        two, said = send(proxy, replicas, conversation, **body(first, text_of(said), "And then?"))
        assert one == two
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(first)
        places.append(one)
    assert set(places) == {0, 1}


def test_haproxy_knows_a_conversation_by_its_first_message(proxy: Proxy, replicas: list[Replica], name: str) -> None:
    if proxy.name != "haproxy":
        pytest.skip("nginx reads headers only")
    places = set()
    for number in range(10):
        system = {"role": "system", "content": "Answer in one sentence."}
        first, *more = body(f"{number} {name}", "Yes.", "Why?")["messages"]
        # The last one is longer than the proxy's buffer; the server refuses it, but it must be the same server.
        long = {"role": "assistant", "content": "y" * 100_000}
        turns = [[system, first], [system, first, *more], [system, first, long, more[-1]]]
        found = {send(proxy, replicas, None, **body(messages=turn))[0] for turn in turns}
        assert len(found) == 1
        places |= found
    assert places == {0, 1}


@contextmanager
def unfinished(proxy: Proxy, asked: dict[str, Any]) -> Iterator[None]:
    """Send a request over a connection that is closed at the end of the block."""
    place = urlsplit(proxy.url)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=60)
    connection.request("POST", CHAT, json.dumps(asked), {"Content-Type": "application/json"})
    yield
    connection.close()


def test_events_of_a_stream_arrive_one_by_one(proxy: Proxy, name: str) -> None:
    asked = body(name, stream=True, max_tokens=240, lookfar={"strategy": "none"})
    times, events = [], []
    start = time.perf_counter()
    with httpx.stream("POST", proxy.url + CHAT, json=asked, timeout=60) as response:
        for part in response.iter_raw():
            times.append(time.perf_counter() - start)
            events.append(part.count(b"data: {"))
    assert sum(events) > 20
    assert max(events) <= 4  # not in large blocks
    assert times[0] < 0.4 * times[-1]


def test_an_answer_is_cancelled_when_its_client_leaves(proxy: Proxy, replicas: list[Replica], name: str) -> None:
    def count(replica: Replica) -> float:
        return replica.metric('lookfar_requests_total{outcome="cancelled"}')

    before = sum(map(count, replicas))
    for number, stream in enumerate((False, True), start=1):
        asked = body(name, stream=stream, max_tokens=400, lookfar={"strategy": "none"})
        with unfinished(proxy, asked):
            wait_until(lambda: any(replica.metric("lookfar_running") for replica in replicas))
        wait_until(lambda number=number: sum(map(count, replicas)) >= before + number, 20)  # type: ignore[misc]


def test_a_replica_drafts_from_answers_of_the_other(proxy: Proxy, replicas: list[Replica], name: str) -> None:
    received = 'lookfar_shared_texts_total{state="received"}'
    before = [replica.metric(received) for replica in replicas]
    asked = body(f"{name}: Hello there, hello", max_tokens=48)
    steps: dict[int, int] = {}
    for number in range(40):
        place, said = send(proxy, replicas, f"{name} {number}", **asked)
        if place not in steps:
            steps[place] = said["usage"]["lookfar"]["steps"]
            other = 1 - place
            wait_until(lambda other=other: replicas[other].metric(received) > before[other])  # type: ignore[misc]
        if len(steps) == 2:
            break
    first, second = steps.values()
    assert second < 0.5 * first
    assert all(replica.metric("lookfar_share_up") == 1 for replica in replicas)


def test_the_shared_store_is_killed_and_restarted_under_load(
    proxy: Proxy, replicas: list[Replica], redis: RedisServer, name: str
) -> None:
    wait_until(lambda: len({replica.metric("lookfar_store_tokens") for replica in replicas}) == 1, 20)
    before = [replica.metric("lookfar_store_tokens") for replica in replicas]
    learned: list[int] = []

    def talk(number: int) -> None:
        for turn in range(20):
            usage = ask(proxy.url, f"{name} {number}", **body(f"{number} {turn} {name}"))["usage"]
            learned.append(min(usage["prompt_tokens"], TAIL) + usage["completion_tokens"] + 1)  # and an end

    with ThreadPoolExecutor(4) as pool:
        talks = [pool.submit(talk, number) for number in range(4)]
        for answers in (8, 24):
            wait_until(lambda answers=answers: len(learned) >= answers, 60)  # type: ignore[misc]
            redis.kill()
            wait_until(lambda: all(replica.metric("lookfar_share_up") == 0 for replica in replicas), 20)
            redis.start()
        for one in talks:
            one.result()  # no request failed

    def grown() -> list[float]:
        return [replica.metric("lookfar_store_tokens") - old for replica, old in zip(replicas, before, strict=True)]

    wait_until(lambda: min(grown()) >= sum(learned), 30)  # all answers, also those given while the server was away
    time.sleep(0.5)
    assert grown() == [sum(learned)] * 2  # and none twice
    assert len(learned) == 80


def test_a_replica_is_killed_under_load(proxy: Proxy, replicas: list[Replica], name: str) -> None:
    conversations = [f"{name} {number}" for number in range(8)]
    expected = {one: text_of(ask(proxy.url, one, **body(one))) for one in conversations}
    victim = replicas[send(proxy, replicas, conversations[0], **body(conversations[0]))[0]]
    answers: list[bool] = []
    stop = threading.Event()

    def talk(conversation: str) -> None:
        while not stop.is_set():
            answers.append(text_of(ask(proxy.url, conversation, **body(conversation))) == expected[conversation])

    with ThreadPoolExecutor(4) as pool:
        talks = [pool.submit(talk, one) for one in conversations[:4]]
        try:
            wait_until(lambda: len(answers) > 20, 60)
            victim.kill()
            killed = len(answers)
            wait_until(lambda: len(answers) > killed + 40 or any(one.done() for one in talks), 60)
        finally:
            stop.set()
        for one in talks:
            one.result()  # no request failed
    assert all(answers)
    assert all(text_of(ask(proxy.url, one, **body(one))) == expected[one] for one in conversations)
    victim.start()
    victim.wait_until_ready()
    back = replicas.index(victim)
    wait_until(lambda: send(proxy, replicas, conversations[0], **body("x"))[0] == back, 30)


def test_a_rolling_restart_fails_no_request(proxy: Proxy, replicas: list[Replica], name: str) -> None:
    place, _ = send(proxy, replicas, name, **body("Hello"))
    leaving, staying = replicas[place], replicas[1 - place]
    asked = body(name, stream=True, max_tokens=400, lookfar={"strategy": "none"})
    events: list[str] = []
    headers = {"X-Conversation-Id": name}
    with httpx.stream("POST", proxy.url + CHAT, json=asked, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        while len(events) < 5:
            events.append(next(lines))
        leaving.send(signal.SIGTERM)
        for _ in range(5):
            send(proxy, [staying], name, **body("Hello again"))
        events += lines
    assert "data: [DONE]" in events
    last = [json.loads(line.removeprefix("data: ")) for line in events if line.startswith("data: {")][-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert leaving.wait() == 0
    leaving.start()
    leaving.wait_until_ready()
    wait_until(lambda: send(proxy, replicas, name, **body("Hello"))[0] == place, 30)


def test_the_state_of_replicas_is_not_public(proxy: Proxy) -> None:
    for path in ("/metrics", "/lookfar/status"):
        assert httpx.get(proxy.url + path).status_code == 404
    assert httpx.post(proxy.url + CHAT, content=b"x" * (5 << 20), timeout=60).status_code == 413


def test_prometheus_scrapes_all_replicas(replicas: list[Replica], tmp_path: Path) -> None:
    if not shutil.which("prometheus"):
        pytest.skip("needs prometheus (apt install prometheus)")
    from redis_server import free_port

    config = (CONFIGS / "prometheus.yml").read_text().replace("15s", "1s")
    config = config.replace("/run/secrets/prometheus_key", str(tmp_path / "key"))
    for number, replica in enumerate(replicas, start=1):
        config = config.replace(f"replica{number}:8000", f"127.0.0.1:{replica.port}")
    (tmp_path / "key").write_text("any")
    (tmp_path / "prometheus.yml").write_text(config)
    port = free_port()
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command = ["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:

        def scraped() -> set[str]:
            try:
                asked = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": "lookfar_tokens_total"})
                return {one["metric"]["replica"] for one in asked.json()["data"]["result"]}
            except (httpx.HTTPError, ValueError, KeyError):
                return set()

        try:
            wait_until(lambda: scraped() == {"replica1", "replica2"}, 30)
        finally:
            process.terminate()
