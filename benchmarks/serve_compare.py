"""Servers on the demo model on a CPU: `transformers serve --continuous-batching`, and lookfar with and without drafts.

    python benchmarks/serve_compare.py --data DIR --clients 1,4,8

Each server runs alone, one after the other, with the same messages; every cell has messages of its own, so that no
server answers a message twice. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from serve_clients import Answer, ask_over_http, in_parallel, mixed_messages, summary
from transformers import AutoTokenizer

from lookfar.models.demo import demo_model

LOOKFAR = [sys.executable, "-c", "from lookfar.cli import main; main()", "serve", "demo", "--device", "cpu"]
WARM = ["Say hello.", "Count from one to ten.", "What is the capital of France?"]


def commands(port: int, names: list[str]) -> dict[str, list[str]]:
    """Return how each server is started."""
    folder, where = str(demo_model()), ["--port", str(port)]
    transformers = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", folder]
    known = {
        "transformers": [*transformers, "--continuous-batching", "--device", "cpu", "--dtype", "float32", *where],
        "lookfar none": [*LOOKFAR, "--strategy", "none", *where],
        "lookfar": [*LOOKFAR, *where],
    }
    return {name: known[name] for name in names}


def wait_until_up(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}") from None
            time.sleep(0.25)
    raise SystemExit("the server does not come up")


def measure(name: str, command: list[str], port: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a server and return one row for each number of clients, with the texts."""
    tokenizer = AutoTokenizer.from_pretrained(str(demo_model()))
    rows = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_up(port, server)

            async def ask(message: str, new: int = given.tokens) -> Answer:
                body = {"messages": [{"role": "user", "content": message}], "max_tokens": new, "temperature": 0.0}
                answer = await ask_over_http(("127.0.0.1", port), {**body, "stream": True})
                answer.tokens = len(tokenizer(answer.text, add_special_tokens=False).input_ids)
                return answer

            asyncio.run(in_parallel(partial(ask, new=8), WARM, 1))
            asyncio.run(in_parallel(partial(ask, new=8), WARM, len(WARM)))
            skip = 0
            for clients in given.clients:
                count = max(given.least, given.each * clients)
                messages = mixed_messages(given.data, count, skip)
                skip += count
                answers, seconds = asyncio.run(in_parallel(ask, messages, clients))
                row = {"server": name, "clients": clients, **summary(answers, seconds)}
                print(json.dumps(row), flush=True)
                rows.append({**row, "texts": [answer.text for answer in answers]})
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a directory of prompts in jsonl files")
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--each", type=int, default=3, help="messages of each client")
    parser.add_argument("--least", type=int, default=6, help="messages of a cell at least")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--servers", type=lambda text: text.split(","), default=["transformers", "lookfar none", "lookfar"]
    )
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows = [r for name, line in commands(port, given.servers).items() for r in measure(name, line, port, given)]
    first = {row["clients"]: row for row in rows if row["server"] == given.servers[0]}
    for row in rows:
        base = first[row["clients"]]
        row["times"] = round(row["tokens_per_second"] / base["tokens_per_second"], 2)
        row["same_texts"] = sum(a == b for a, b in zip(row["texts"], base["texts"], strict=True))
    load = os.getloadavg()[0]
    print(json.dumps({"load": load, "rows": [{k: v for k, v in row.items() if k != "texts"} for row in rows]}))


if __name__ == "__main__":
    main()
