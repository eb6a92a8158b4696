"""The proposer inside vLLM on a CPU: tensor parallel, and data parallel with a shared store."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING or find_spec("vllm") is not None:
    from vllm_live.engines import NEW_TOKENS, Engine, prompts, speculation, tiny_llama

from lookfar.models.demo import demo_model
from redis_server import RedisServer, free_port, needs_server

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in an environment of its own: make vllm-test"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.real,
]
TWO_RANKS = {"tensor_parallel_size": 2, "max_model_len": 512}


def test_tensor_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = tiny_llama(tmp_path / "model")
    asked = [[2 + (7 * i + 3 * j) % 200 for j in range(20 + i)] for i in range(12)]
    with Engine(model, **TWO_RANKS) as engine:
        plain = engine.tokens(asked)
    with Engine(model, {}, **TWO_RANKS) as engine:
        assert engine.llm.collective_rpc("give_request_ids") == [True, True]
        assert engine.tokens(asked) == plain
        assert engine.tokens(asked) == plain
        first, second = engine.counts()
        assert first["failures"] == second["failures"] == 0
        assert engine.metric("num_accepted_tokens") > 12 * NEW_TOKENS / 2
        for name in ("calls", "rows", "drafted", "accepted", "texts"):  # both ranks see and propose the same
            assert first[name] == second[name] > 0


class Servers:
    """Two data-parallel engines, each of a `vllm serve` of its own as on two machines; the second one is headless."""

    def __init__(self, share: str, folder: Path) -> None:
        self.port, rpc = free_port(), str(free_port())
        both = [
            *(str(demo_model()), "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1"),
            *("--data-parallel-rpc-port", rpc, "--max-num-seqs", "8"),
            *("--speculative-config", json.dumps(speculation())),
            *("--additional-config", json.dumps({"lookfar": {"share": share, "namespace": "vllm"}})),
        ]
        self.log = folder / "serve.log"
        self._file = self.log.open("w")
        self._processes = [
            self._start([*both, "--port", str(self.port), "--api-server-count", "1"]),
            self._start([*both, "--headless", "--data-parallel-start-rank", "1"]),
        ]

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).parent / "serve.py"), "serve", *arguments]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=environment, stdout=self._file, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert all(process.poll() is None for process in self._processes), self.log.read_text()[-3000:]
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, ids: list[int], rank: int) -> str:
        """Return the text that one of the engines decodes."""
        body = {"model": str(demo_model()), "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def accepted(self, rank: int) -> float:
        pattern = rf'vllm:spec_decode_num_accepted_tokens_total{{engine="{rank}".*}} (\S+)'
        return sum(float(value) for value in re.findall(pattern, self.get("/metrics")))

    def close(self) -> None:
        for process in self._processes:
            try:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
            except (subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._file.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with RedisServer(tmp_path) as redis:
        found = Servers(redis.url, tmp_path)
        try:
            found.wait()
            yield found
        finally:
            found.close()


@needs_server
def test_data_parallel_engines_share_what_they_learn(servers: Servers) -> None:
    asked = prompts()[::5]
    cold = [servers.complete(ids, rank=0) for ids in asked]
    before: Any = servers.accepted(0), servers.accepted(1)
    time.sleep(3)  # an idle engine shares its last answer after one second
    assert [servers.complete(ids, rank=1) for ids in asked] == cold
    assert servers.accepted(0) == before[0]
    assert before[1] == 0
    assert servers.accepted(1) > 1.5 * before[0]
