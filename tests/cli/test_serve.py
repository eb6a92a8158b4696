"""`lookfar serve` as a process: it starts, answers, saves its store, and stops when it is told to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import httpx
import pytest
import torch

from families import tiny_model
from helpers import byte_tokenizer, wait_until
from lookfar.cli import main

COMMAND = [sys.executable, "-c", "from lookfar.cli import main; main()", "serve"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("llama", torch.float32, vocab_size=258)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_a_server_process_answers_and_stops(saved: Path, port: int, tmp_path: Path) -> None:
    store = tmp_path / "answers.store"
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--name", "tiny", "--store", str(store), "--log", "json", "--budget", "8"]
    environment = {**os.environ, "LOOKFAR_API_KEYS": "a-key"}
    with subprocess.Popen(
        [*COMMAND, str(saved), "--no-warmup", *options], stderr=subprocess.PIPE, env=environment
    ) as process:
        wait_until(lambda: is_up(url) or process.poll() is not None, 120)
        headers = {"Authorization": "Bearer a-key"}
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["model"] == "tiny"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = process.stderr.read().decode()
        assert process.wait(30) == 0, log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    logged = [line for line in lines if line.get("path") == "/v1/chat/completions"]
    assert logged[0]["usage"]["completion_tokens"] >= 1
    assert logged[0]["id"] == answer.headers["x-request-id"]
    assert lines[-1]["event"] == "stopped"
    assert store.exists()


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_while_it_starts_stops(saved: Path, port: int) -> None:
    options = ["--port", str(port), "--host", "0.0.0.0"]
    with subprocess.Popen([*COMMAND, str(saved), *options], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"Everyone who can reach 0.0.0.0" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None or is_up(f"http://127.0.0.1:{port}"), 60)
        stopped = process.poll()
        process.kill()
    assert stopped == 128 + signal.SIGTERM


def test_mistakes_are_one_sentence(
    saved: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lookfar.server.logs.set_up_logs", lambda *_: None)  # loggers belong to the whole process
    monkeypatch.setattr("signal.signal", lambda *_: None)  # so do signals

    def complaint(*options: str) -> str:
        words = ["lookfar", "serve", str(saved), "--no-warmup", "--budget", "8", *options]
        monkeypatch.setattr(sys, "argv", words)
        with warnings.catch_warnings(), pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    with socket.socket() as taken, monkeypatch.context() as patch:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        patch.setattr(sys.modules["lookfar.cli.serve"], "_load", lambda *_: pytest.fail("a model was loaded"))
        assert "use another --port" in complaint("--port", str(port))
        assert "use another --host" in complaint("--host", "192.0.2.1")
    assert "cannot be read" in complaint("--keys", str(tmp_path / "none"))
    assert "not a directory" in complaint("--store", str(tmp_path / "none" / "x.store"))
