"""Shared by the benchmarks of servers: prompts, clients that measure a stream, and their summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from lookfar.bench.suites import read_suite

SUITES = ("mt_bench", "gsm8k", "dolly", "mbpp", "xsum")
QUESTIONS = (
    "Write a short story about {}.",
    "Explain to a child how {} works, step by step.",
    "List five facts about {} and repeat each of them in other words.",
    "Write a Python function that simulates {}, and explain each line.",
)
THINGS = ("a lighthouse", "a bicycle", "rain", "a library", "a volcano", "bees", "a clock", "tides", "a bakery", "snow")


@dataclass
class Answer:
    """When the parts of one answer came."""

    text: str = ""
    first: float = 0.0  # seconds to the first token
    seconds: float = 0.0  # of the whole answer
    gaps: list[float] = field(default_factory=list)  # between two parts
    tokens: int = 0

    def add(self, text: str, now: float) -> None:
        """Add a part that came `now` seconds after the request was sent."""
        if self.seconds:
            self.gaps.append(now - self.seconds)
        else:
            self.first = now
        self.text, self.seconds = self.text + text, now

    def add_event(self, line: bytes, started: float) -> None:
        """Add the text of a line of an event stream."""
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                if piece := choice["delta"].get("content"):
                    self.add(piece, perf_counter() - started)


def mixed_messages(data: Path | None, count: int, skip: int = 0) -> list[str]:
    """Return different messages: of the suites in a directory, made up if there is none."""
    if data is None:
        made = [question.format(thing) for thing in THINGS for question in QUESTIONS]
        return [made[i % len(made)] + " " * (i // len(made)) for i in range(skip, skip + count)]
    names = [name for name in SUITES if (data / f"{name}.jsonl").exists()] or SUITES
    each = -(-(skip + count) // len(names))
    suites = [read_suite(name, data, each) for name in names]
    texts = [suite[i].text for i in range(each) for suite in suites if i < len(suite)]
    return texts[skip : skip + count]


async def in_parallel(
    ask: Callable[[str], Awaitable[Answer]], messages: Seq[str], clients: int
) -> tuple[list[Answer], float]:
    """Let so many clients send the messages, each one after the other; returns the answers and the seconds of all."""
    left = iter(enumerate(messages))
    answers: list[Answer | None] = [None] * len(messages)

    async def client() -> None:
        for place, message in left:
            answers[place] = await ask(message)

    started = perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return [answer for answer in answers if answer is not None], perf_counter() - started


def summary(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Return throughput and latencies; a gap is that between two parts, each of one or more tokens."""
    tokens = sum(answer.tokens for answer in answers)
    decoding = sum(answer.seconds - answer.first for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    firsts = [answer.first for answer in answers]
    return {
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "first_token_p50": round(quantile(firsts, 0.5), 4),
        "first_token_p99": round(quantile(firsts, 0.99), 4),
        "gap_p50": round(quantile(gaps, 0.5), 4),
        "gap_p99": round(quantile(gaps, 0.99), 4),
        "seconds_per_token": round(decoding / max(1, tokens - len(answers)), 5),
    }


def quantile(values: Seq[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def ask_over_http(address: tuple[str, int], body: dict[str, Any]) -> Answer:
    """Send a chat request over a connection of its own and read its stream."""
    content = json.dumps(body).encode()
    started = perf_counter()
    reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    answer = Answer()
    status = int((await reader.readline()).split()[1])
    while line := await reader.readline():
        answer.add_event(line, started)
    writer.close()
    if status != 200:
        raise RuntimeError(f"the server answered with {status}")
    return answer
