"""The server on a GPU: throughput and latency of many clients, with and without speculation, in one process.

    python benchmarks/serve_gpu.py --data DIR --clients 1,8,32,64

Requests go through the ASGI application where FastAPI is installed, and otherwise through the service below it, with
chunks encoded as JSON. Every cell decodes the same messages with and without speculation, one after the other, from an
empty draft state. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from serve_clients import Answer, in_parallel, mixed_messages, summary

import lookfar
from lookfar.server.choices import make_choices
from lookfar.server.config import ServerConfig
from lookfar.server.jobs import Job
from lookfar.server.service import Service

SWITCH_SECONDS = 0.0005  # as in `lookfar serve`


async def ask_service(service: Service, options: dict[str, Any], message: str) -> Answer:
    """Send a message through the service."""
    lm, started, answer = service.lm, perf_counter(), Answer()
    prompt = await service.in_thread(lambda: lm.chat_ids([{"role": "user", "content": message}]))
    generation = await service.submit(Job([prompt], options, stream=True))
    choices = make_choices(lm.tokenizer, generation.job, generation.prepared)
    async for outputs in generation:
        text = "".join(choices[output.index].add(output).text for output in outputs)
        json.dumps({"id": "chatcmpl-0", "object": "chat.completion.chunk", "choices": [{"delta": {"content": text}}]})
        answer.add(text, perf_counter() - started)
        answer.tokens = len(choices[0].tokens)
    return answer


async def ask_app(app: Any, service: Service, options: dict[str, Any], message: str) -> Answer:
    """Send a message through the ASGI application."""
    speculation = {"lookfar": {"strategy": options["strategy"]}} if options.get("strategy") else {}
    fields = {"messages": [{"role": "user", "content": message}], "max_tokens": options["max_new_tokens"]}
    body = json.dumps({**fields, **speculation, "stream": True}).encode()
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST"}
    scope |= {"path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "root_path": "", "scheme": "http"}
    scope |= {"headers": [(b"content-type", b"application/json")], "client": ("test", 1), "server": ("test", 80)}
    answer, started, waiting = Answer(), perf_counter(), asyncio.Event()
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in received:
            return message
        await waiting.wait()

    async def send(sent: Any) -> None:
        for line in sent.get("body", b"").split(b"\n"):
            answer.add_event(line, started)

    await app(scope, receive, send)
    assert service.lm.tokenizer is not None
    answer.tokens = len(service.lm.tokenizer(answer.text, add_special_tokens=False).input_ids)
    return answer


def make_app(service: Service) -> Any:
    from lookfar.server.app import create_app

    return create_app(service)


async def measure(lm: lookfar.LM, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all cells on one service."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    service = Service(lm, ServerConfig(max_queue=4096, prefix_bytes=given.prefix_mib << 20))
    await service.start()
    app = make_app(service) if given.through == "app" else None
    rows, skip = [], 0
    for clients in given.clients:
        count = max(given.least, given.each * clients)
        messages = mixed_messages(given.data, count, skip)
        skip += count
        found: dict[str, list[dict[str, Any]]] = {"none": [], "auto": []}
        for repeat in range(given.repeats):
            for strategy in ("none", "auto") if repeat % 2 == 0 else ("auto", "none"):
                lm.forget()
                service.namespaces._states[""] = lm.draft_state
                if (prefixes := lm.engine.scheduler.reuse.prefixes) is not None:
                    prefixes.clear()
                options = {"max_new_tokens": given.tokens, "do_sample": False, "strategy": strategy}
                options |= {"budget": "auto"} if strategy == "auto" else {}
                before = lm.engine.counts.tokens, lm.engine.counts.decoded
                ask = partial(ask_service, service, options) if app is None else partial(ask_app, app, service, options)
                answers, seconds = await in_parallel(ask, messages, clients)
                tokens, decoded = lm.engine.counts.tokens - before[0], lm.engine.counts.decoded - before[1]
                per_step = round(tokens / max(1, decoded), 3)
                row = {"clients": clients, "strategy": strategy, "tokens_per_step": per_step}
                row |= summary(answers, seconds)
                found[strategy].append({**row, "texts": [answer.text for answer in answers]})
                print(json.dumps(row), flush=True)
        rate = {name: median(row["tokens_per_second"] for row in cell) for name, cell in found.items()}
        same = sum(a == b for a, b in zip(found["none"][0]["texts"], found["auto"][0]["texts"], strict=True))
        rows.append({"clients": clients, **rate, "times": round(rate["auto"] / rate["none"], 3), "same_texts": same})
        rows[-1] |= {"answers": len(messages), "cells": [_without_texts(r) for cell in found.values() for r in cell]}
        print(json.dumps({name: value for name, value in rows[-1].items() if name != "cells"}), flush=True)
    await service.close()
    sys.setswitchinterval(interval)
    return rows


def _without_texts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "texts"}


def has_http() -> bool:
    try:
        import fastapi  # noqa: F401
    except ImportError:
        return False
    return True


def server_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a directory of prompts in jsonl files")
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--each", type=int, default=2, help="messages of each client")
    parser.add_argument("--least", type=int, default=8, help="messages of a cell at least")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--prefix-mib", type=int, default=1024)
    parser.add_argument("--through", choices=["app", "service"], default="app" if has_http() else "service")
    return parser.parse_args(arguments)


def main() -> None:
    given = server_options()
    most = max(given.clients)
    lm = lookfar.load("demo", device=given.device, dtype=given.dtype, max_batch=most, compile=given.compile)
    lm.warmup(requests=most)
    lm.driver.works_when_idle = True
    rows = asyncio.run(measure(lm, given))
    name = torch.cuda.get_device_name() if lm.device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "dtype": given.dtype, "through": given.through, "rows": rows}))


if __name__ == "__main__":
    main()
