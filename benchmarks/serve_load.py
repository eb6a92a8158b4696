"""Load on a server: thousands of mixed requests, a fifth of them cancelled, and what is left behind.

Clients and server share one process, a tiny random model decodes. Every answer is compared with that of `LM.generate`.
Some clients disconnect in the middle of a stream, before the answer or in the middle of a request; some send malformed
bodies or prompts that are too long; some read slowly. Ends in one JSON line.

    python benchmarks/serve_load.py --requests 10000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from live_server import LiveServer, byte_lm, live_server
from lookfar.lm import LM
from lookfar.server.config import ServerConfig

# What a client does, and how often.
MIX = {
    "whole": 40,
    "streamed": 30,
    "slow reader": 3,
    "leaves mid-stream": 10,
    "leaves while waiting": 6,
    "leaves mid-request": 4,
    "malformed body": 4,
    "prompt too long": 2,
    "body too large": 1,
}
WORDS = ["the", "fox", "walks", "to", "the", "river", "and", "drinks", "one", "two", "three", "four", "five", "six"]
CANCELS = ("leaves mid-stream", "leaves while waiting", "leaves mid-request")
EXPECTED_STATUS = {"malformed body": 400, "prompt too long": 400, "body too large": 413}


@dataclass
class Tally:
    """What happened to the requests."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MiB, after each tenth of the requests


@dataclass(frozen=True)
class Case:
    """A request whose answer is known."""

    fields: dict[str, Any]
    text: str


def known_cases(lm: LM, count: int) -> list[Case]:
    """Return requests with the answers of `LM.generate`."""
    rng = random.Random(1)
    cases = []
    for i in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))
        length = rng.choice([4, 8, 16, 32])
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": length}
        options: dict[str, Any] = {"max_new_tokens": length}
        if i % 3 == 1:
            fields |= {"temperature": 0.8, "seed": i}
            options |= {"temperature": 0.8, "top_k": 0, "seed": i}
        elif i % 3 == 2:
            fields |= {"presence_penalty": 0.5, "lookfar": {"strategy": "suffix", "remember": False}}
            options |= {"presence_penalty": 0.5}
        cases.append(Case(fields, lm.generate(prompt, **options).text))
    return cases


class Client:
    """Sends requests over plain sockets, so that it can leave at any point."""

    def __init__(self, url: str, cases: list[Case], tally: Tally) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._cases = cases
        self._tally = tally

    async def send(self, kind: str, rng: random.Random) -> None:
        """Make one request of a kind; its end is counted exactly once."""
        started, end = time.perf_counter(), "no end"
        try:
            end = await asyncio.wait_for(self._send(kind, rng), 120)
        except asyncio.TimeoutError:
            end = "hangs"
        except (OSError, asyncio.IncompleteReadError) as error:
            end = f"connection: {type(error).__name__}"
        self._tally.ends[f"{kind}: {end}"] += 1
        self._tally.seconds.append(time.perf_counter() - started)

    async def _send(self, kind: str, rng: random.Random) -> str:
        case = rng.choice(self._cases)
        fields = case.fields
        if kind in ("streamed", "slow reader", "leaves mid-stream"):
            fields = {**fields, "stream": True}
        if kind in ("leaves while waiting", "leaves mid-stream"):
            fields = {**fields, "max_tokens": 200, "ignore_eos": True}
        body = json.dumps(fields).encode()
        if kind == "malformed body":
            body = rng.choice([b"{", b"[]", body[: len(body) // 2], json.dumps({**fields, "nonsense": 1}).encode()])
        elif kind == "prompt too long":
            body = json.dumps({**fields, "prompt": "a" * 3000}).encode()
        elif kind == "body too large":
            body = json.dumps({**fields, "prompt": "a" * (5 << 20)}).encode()
        reader, writer = await self._connect(small_buffer=kind == "slow reader")
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            if kind == "leaves mid-request":
                writer.write(body[: len(body) // 2])
                await asyncio.sleep(rng.random() * 0.01)
                return "left"
            writer.write(body)
            if kind == "leaves while waiting":
                await asyncio.sleep(rng.random() * 0.05)
                return "left"
            return await self._read(kind, case, reader, rng)
        finally:
            writer.transport.abort() if kind in CANCELS else writer.close()

    async def _connect(self, small_buffer: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        if small_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        return await asyncio.open_connection(sock=sock, limit=1 << 22)

    async def _read(self, kind: str, case: Case, reader: asyncio.StreamReader, rng: random.Random) -> str:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split()[1])
        if status == 429:
            return "429"
        if kind in EXPECTED_STATUS:
            return "refused" if status == EXPECTED_STATUS[kind] else f"wrong status {status}"
        if status != 200:
            return f"wrong status {status}"
        if kind == "leaves mid-stream":
            for _ in range(rng.randint(1, 4)):
                await reader.readuntil(b"\n\n")
            return "left"
        content = b""
        while part := await reader.read(512 if kind == "slow reader" else 1 << 16):
            content += part
            if kind == "slow reader":
                await asyncio.sleep(0.02)
        text = _text_of(content, streamed=kind != "whole")
        if text != case.text:
            self._tally.wrong.append(f"{kind}: {case.fields}: {text[:200]}")
            return "wrong text"
        return "right text"


def _text_of(content: bytes, streamed: bool) -> str:
    if not streamed:
        return str(json.loads(content)["choices"][0]["text"])
    text = ""
    for line in content.decode().splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return f"error: {chunk['error']['message']}"
            text += chunk["choices"][0]["text"]
    return text


async def send_all(url: str, cases: list[Case], requests: int, clients: int) -> Tally:
    """Send the requests with so many clients at once."""
    tally = Tally()
    client = Client(url, cases, tally)
    kinds = random.Random(2).choices(list(MIX), list(MIX.values()), k=requests)
    left = iter(enumerate(kinds))
    tenth = max(1, requests // 10)

    async def worker() -> None:
        for number, kind in left:
            await client.send(kind, random.Random(number))
            if number % tenth == tenth - 1:
                gc.collect()
                tally.memory.append(round(psutil.Process().memory_info().rss / 2**20, 1))

    await asyncio.gather(*(worker() for _ in range(clients)))
    return tally


def leftovers(server: LiveServer, threads: int) -> dict[str, int]:
    """Return what is still there when all clients have gone; all numbers should be 0."""
    deadline = time.monotonic() + 20
    found: dict[str, int] = {}
    while time.monotonic() < deadline:
        scheduler, service = server.service.lm.engine.scheduler, server.service
        found = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.retrying) + service.admission.waiting,
            "paused": len(scheduler.paused),
            "slots": len(server.service.lm.engine.cache.order),
            "places": service.admission.active,
            "generations": len(service.open),
            "submissions": len(service.lm.driver._submissions),
            "connections": len(server.server.server_state.connections),
            "tasks": len(server.server.server_state.tasks),
            "threads": max(0, threading.active_count() - threads),
        }
        if not any(found.values()):
            break
        time.sleep(0.05)
    return found


def measure(requests: int, clients: int, remember: bool = True) -> dict[str, Any]:
    """Run the load on a new server. With `remember` its draft store grows with the answers, up to its bound."""
    lm = byte_lm(max_batch=8, remember=remember)
    cases = known_cases(lm, 40)
    with live_server(lm, ServerConfig(model_name="tiny", max_queue=4 * clients)) as server:
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        asyncio.run(send_all(server.url, cases, min(200, requests), clients))  # compiles, and fills the thread pools
        leftovers(server, threading.active_count())
        before, threads = Counter(server.service.metrics.outcomes), threading.active_count()
        started = time.perf_counter()
        tally = asyncio.run(send_all(server.url, cases, requests, clients))
        seconds = time.perf_counter() - started
        left = leftovers(server, threads)
        outcomes = Counter(server.service.metrics.outcomes) - before
    tally.seconds.sort()
    return {
        "requests": requests,
        "clients": clients,
        "seconds": round(seconds, 1),
        "per_second": round(requests / seconds, 1),
        "p50_seconds": round(tally.seconds[len(tally.seconds) // 2], 4),
        "p99_seconds": round(tally.seconds[int(0.99 * len(tally.seconds))], 4),
        "ends": dict(sorted(tally.ends.items())),
        "wrong_texts": tally.wrong[:10],
        "server_outcomes": dict(outcomes),
        "left_behind": left,
        "memory_mib": tally.memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--no-remember", action="store_true", help="keep the draft store empty")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(given.requests, given.clients, not given.no_remember)))


if __name__ == "__main__":
    main()
