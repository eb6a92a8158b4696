"""The draft store of a server: loaded, saved at intervals and at the end, whole after any kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers import byte_tokenizer, wait_until
from live_server import byte_lm, live_server
from lookfar.errors import StoreError
from lookfar.lm import LM
from lookfar.retrieval.draft_store import DraftStore
from lookfar.server.config import ServerConfig
from lookfar.server.keys import load_keys
from lookfar.server.service import Service
from redis_server import RedisServer, needs_server

WRITER = """
import sys, numpy as np
from pathlib import Path
from lookfar.retrieval.draft_store import DraftStore
store = DraftStore(258)
store.learn(np.random.default_rng(0).integers(0, 258, 200_000).tolist())
print("ready", flush=True)
while True:
    store.learn([1, 2, 3])
    store.save(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def lm() -> LM:
    return byte_lm()


def test_answers_are_saved_at_intervals_and_at_the_end(lm: LM, tmp_path: Path) -> None:
    file = tmp_path / "answers.store"
    lm.forget()
    config = ServerConfig(model_name="tiny", store=file, save_seconds=0.05)
    with live_server(lm, config) as server:
        body = {"prompt": "Hello", "max_tokens": 8}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        wait_until(file.exists)
        wait_until(lambda: _tokens(file) >= 8)
        saved = _tokens(file)
    lm.forget()
    with live_server(lm, ServerConfig(model_name="tiny", store=file, save_seconds=1000)) as server:
        assert lm.store.tokens == saved
        httpx.post(f"{server.url}/v1/completions", json={**body, "lookfar": {"remember": False}}, timeout=60)
        assert lm.store.tokens == saved
        httpx.post(f"{server.url}/v1/completions", json={**body, "prompt": "Bye"}, timeout=60)
    assert _tokens(file) == lm.store.tokens > saved


def test_namespaces_have_files_of_their_own(lm: LM, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice a-key\nbob b-key remember=false\n")
    config = ServerConfig(model_name="tiny", store=tmp_path / "answers.store", save_seconds=1000)
    with live_server(lm, config, load_keys(keys, "")) as server:
        for key in ("a-key", "b-key"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "Hello", "max_tokens": 8}
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert _tokens(tmp_path / "answers.alice.store") >= 8
    assert not (tmp_path / "answers.bob.store").exists()


@needs_server
def test_replicas_draft_from_answers_of_each_other_and_tenants_do_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice a-key\nbob b-key\n")

    def ask(url: str, key: str) -> dict[str, Any]:
        body = {"prompt": "Hello there, hello", "max_tokens": 32, "lookfar": {"strategy": "suffix", "budget": 8}}
        headers = {"Authorization": f"Bearer {key}"}
        answered: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()
        return answered

    with RedisServer(tmp_path) as redis:
        config = ServerConfig(model_name="tiny", share=redis.url)
        with (
            live_server(byte_lm(), config, load_keys(keys, "")) as first,
            live_server(byte_lm(), config, load_keys(keys, "")) as second,
        ):
            for server in (first, second):
                states = [server.service.namespaces.draft_state(name) for name in ("alice", "bob")]
                wait_until(lambda states=states: all(state.store.sharing is not None for state in states))
            alone = ask(first.url, "a-key")
            share = second.service.share
            assert share is not None
            wait_until(lambda: share.counts.received > 0)
            warm, other = ask(second.url, "a-key"), ask(second.url, "b-key")
    texts = [one["choices"][0]["text"] for one in (alone, warm, other)]
    assert texts[0] == texts[1] == texts[2]
    steps = [one["usage"]["lookfar"]["steps"] for one in (alone, warm, other)]
    assert steps[1] < steps[0] == steps[2]


def test_a_store_that_cannot_be_used_is_an_error_at_the_start(lm: LM, tmp_path: Path) -> None:
    file = tmp_path / "answers.store"
    file.write_bytes(b"not a store")
    with pytest.raises(StoreError):
        Service(lm, ServerConfig(store=file))
    with pytest.raises(StoreError, match="not a directory"):
        Service(lm, ServerConfig(store=tmp_path / "none" / "answers.store"))


def test_a_store_file_is_for_one_server(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(model_name="tiny", store=tmp_path / "answers.store")
    with live_server(lm, config), pytest.raises(StoreError, match="Another server uses"):
        Service(lm, config)
    with live_server(lm, config):
        pass
    with pytest.raises(StoreError, match="is a directory"):
        Service(lm, ServerConfig(store=tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StoreError, match="cannot be written to"):
        Service(lm, config)
    monkeypatch.setattr(lm, "remember", False)  # the file is only read
    Service(lm, config)


@pytest.mark.slow
def test_a_store_is_whole_after_a_kill_while_it_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "answers.store"
    for round_ in range(6):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            wait_until(file.exists, 30)
            time.sleep(0.02 * round_ + 0.01)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        assert _tokens(file) >= 200_000  # its checksum is right, too
    store = DraftStore(258, byte_tokenizer())
    store.save(file)  # what the killed ones left is cleared away
    assert list(tmp_path.iterdir()) == [file]


def _tokens(file: Path) -> int:
    store = DraftStore(258, byte_tokenizer())
    store.load(file)
    return store.tokens
