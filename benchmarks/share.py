"""A shared draft store: time and memory of many tokens through the stream, and what sharing costs a replica.

    python benchmarks/share.py --tokens 1000000
    python benchmarks/share.py --decode 20

Starts a Redis or Valkey server of its own on a free port. One store learns texts of random length and publishes them;
a second one receives them, live and then from the stream as a new replica would. With `--decode`, the demo model
answers prompts with and without sharing, and a second replica answers them after it: tokens per step and per second.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import psutil

import lookfar
from lookfar.engine.stats import add_up
from lookfar.retrieval.draft_store import DraftStore

VOCABULARY = 49_152
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a fox and a river.",
    "List five uses of copper and say why each one works.",
    "Write a Python function that sorts a list of words by their length.",
    "What is the difference between a virus and a bacterium?",
    "Describe how bread is made, step by step.",
    "Write a letter to a neighbour about a borrowed ladder.",
    "Why do the seasons change?",
)


@contextmanager
def running_server() -> Iterator[tuple[str, psutil.Process]]:
    """Start a server; yields its URL and process."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("This needs redis-server or valkey-server: apt install redis-server.")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while True:
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def stream(tokens: int) -> dict[str, Any]:
    """Publish random texts; measure both replicas, the server, and the look-ups of a replica that receives."""
    rng = np.random.default_rng(0)
    texts = []
    while tokens > sum(map(len, texts)):
        texts.append(rng.integers(0, VOCABULARY, int(rng.integers(50, 600))).tolist())
    total = sum(map(len, texts))
    with running_server() as (url, server):
        before = server.memory_info().rss
        stores = [DraftStore(VOCABULARY) for _ in range(3)]
        shares = [lookfar.Share(url) for _ in stores]
        for store, share in zip(stores[:2], shares, strict=False):
            store.add([1, 2, 3])  # compile first
            store.find(np.array([1, 2], np.int32), 16, 24)
            share.attach(store)
        lookups = LookUps(stores[1], texts[0][:32])
        time.sleep(0.5)
        idle, lookups.seconds = lookups.seconds, []
        added = []
        start = perf_counter()
        for text in texts:
            now = perf_counter()
            stores[0].add(text)
            added.append(perf_counter() - now)
            while len(shares[0]._waiting) > 512:  # no replica decodes as fast as this loop
                time.sleep(0.0005)
        shares[0].flush(120)
        shares[1].flush(120)
        live = perf_counter() - start
        busy = lookups.stop()
        start = perf_counter()
        shares[2].attach(stores[2])
        shares[2].flush(120)
        catching_up = perf_counter() - start
        after = server.memory_info().rss
        for share in shares:
            share.close()
    assert shares[1].counts.received == shares[2].counts.received == len(texts)
    assert stores[1].tokens == total + 3
    return {
        "texts": len(texts),
        "tokens": total,
        "seconds_live": live,
        "seconds_new_replica": catching_up,
        "server_bytes": after - before,
        "store_bytes": stores[1].nbytes,
        "add_us_median": 1e6 * float(np.median(added)),
        "lookup_us_idle_median_p99": [1e6 * float(np.quantile(idle, q)) for q in (0.5, 0.99)],
        "lookup_us_receiving_median_p99": [1e6 * float(np.quantile(busy, q)) for q in (0.5, 0.99)],
    }


class LookUps:
    """Look-ups of another thread, as decoding makes them, one each millisecond."""

    def __init__(self, store: DraftStore, tail: list[int]) -> None:
        self.seconds: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(store, np.array(tail, np.int32)))
        self._thread.start()

    def _run(self, store: DraftStore, tail: Any) -> None:
        while not self._done.wait(0.001):
            start = perf_counter()
            store.find(tail, 16, 24)
            self.seconds.append(perf_counter() - start)

    def stop(self) -> list[float]:
        self._done.set()
        self._thread.join()
        return self.seconds


def decode(new: int, rounds: int) -> dict[str, Any]:
    """Decode prompts on two replicas in one process; returns tokens per step and per second."""
    report: dict[str, Any] = {"prompts": len(PROMPTS), "max_new_tokens": new}
    with running_server() as (url, _):
        replicas = [lookfar.load("demo", dtype="float32", budget=8, strategy="auto") for _ in range(2)]
        prompts = [replicas[0].chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]

        def answer(lm: lookfar.LM) -> tuple[float, float, list[list[int]]]:
            done = [lm.generate(prompt, max_new_tokens=new) for prompt in prompts]
            stats = add_up(each.stats for each in done)
            return stats.tokens_per_step, stats.tokens_per_second, [each.token_ids for each in done]

        answer(replicas[0])  # warm up
        rates: dict[str, list[float]] = {"alone": [], "shared": []}
        for _ in range(rounds):
            replicas[0].forget()
            report["alone"], rate, expected = answer(replicas[0])
            rates["alone"].append(rate)
            replicas[0].forget()
            share = lookfar.Share(url)
            share.attach(replicas[0].store, f"round{len(rates['shared'])}")
            _, rate, found = answer(replicas[0])
            rates["shared"].append(rate)
            assert found == expected
            share.flush()
            share.close()
        share = lookfar.Share(url)
        share.attach(replicas[1].store, "round0")
        share.flush()
        report["second_replica"], _, found = answer(replicas[1])
        assert found == expected
        share.close()
    report["tokens_per_second"] = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens through the stream; 0: none")
    parser.add_argument("--decode", type=int, default=0, help="new tokens for each prompt; 0: do not decode")
    parser.add_argument("--rounds", type=int, default=3, help="with and without sharing")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    if options.tokens:
        report["stream"] = stream(options.tokens)
    if options.decode:
        report["decode"] = decode(options.decode, options.rounds)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
