"""Draft stores shared through a real server: what arrives, what is refused, and servers that are away."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import lookfar
from helpers import byte_tokenizer, random_prompts, reference, wait_until
from lookfar.errors import ConfigError, StoreError
from lookfar.retrieval.draft_store import IN_TRIE, DraftStore
from lookfar.retrieval.suffix_index import END
from lookfar.sharing import share as share_module
from lookfar.sharing.record import MAX_TOKENS, Record, encode
from lookfar.sharing.share import Share
from redis_server import RedisServer, needs_server

pytestmark = needs_server
VOCAB, NEW = 100, 24


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running
        for share in list(share_module._shares):
            share.close()


def texts_of(store: DraftStore) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[]]
    for token in store.index.text.tolist():
        if token == END:
            found.append([])
        else:
            found[-1].append(token)
    return [tuple(text) for text in found[:-1]]


def shared_store(url: str, namespace: str = "", **options: int) -> tuple[DraftStore, Share]:
    store, share = DraftStore(VOCAB), Share(url, **options)
    share.attach(store, namespace)
    return store, share


def test_the_second_replica_drafts_from_answers_of_the_first(server: RedisServer, llama: PreTrainedModel) -> None:
    prompts = random_prompts(12, 9, 20)
    first, second, alone = (lookfar.LM(llama, strategy="suffix", budget=16) for _ in range(3))
    shares = Share(server.url), Share(server.url)
    for lm, share in zip((first, second), shares, strict=True):
        share.attach(lm.store)
    expected = [reference(llama, prompt, NEW) for prompt in prompts]
    assert [done.token_ids for done in first.generate(prompts, max_new_tokens=NEW)] == expected
    assert all(share.flush() for share in shares)
    assert shares[0].counts.published == shares[1].counts.received == 3
    assert sorted(texts_of(second.store)) == sorted(texts_of(first.store))
    warm, cold = second.generate(prompts, max_new_tokens=NEW), alone.generate(prompts, max_new_tokens=NEW)
    assert [done.token_ids for done in warm] == [done.token_ids for done in cold] == expected
    assert sum(done.stats.steps for done in warm) < 0.5 * sum(done.stats.steps for done in cold)


def test_tokens_of_sampled_requests_stay_the_same(server: RedisServer, llama: PreTrainedModel) -> None:
    prompts = random_prompts(8, 11)
    first, second = lookfar.LM(llama, budget=8), lookfar.LM(llama, budget=8)
    shares = Share(server.url), Share(server.url)
    for lm, share in zip((first, second), shares, strict=True):
        share.attach(lm.store)
    asked = {"max_new_tokens": NEW, "do_sample": True, "seed": 3}
    one = [done.token_ids for done in first.generate(prompts, **asked)]
    assert all(share.flush() for share in shares)
    assert [done.token_ids for done in second.generate(prompts, **asked)] == one


@pytest.mark.slow
def test_the_server_is_killed_and_restarted_under_load(tmp_path: Path, llama: PreTrainedModel) -> None:
    lms = [lookfar.LM(llama, strategy="suffix", budget=4) for _ in range(2)]
    shares: list[Share] = []
    prompts = random_prompts(*[10] * 60, seed=5)
    answers: dict[int, list[list[int]]] = {0: [], 1: []}
    errors: list[BaseException] = []

    def decode(which: int) -> None:
        try:
            for prompt in prompts[30 * which : 30 * which + 30]:
                answers[which].append(lms[which].generate(prompt, max_new_tokens=8).token_ids)
                time.sleep(0.01)
        except BaseException as error:
            errors.append(error)

    with RedisServer(tmp_path, appendonly="yes", appendfsync="always") as server:
        for lm in lms:
            shares.append(Share(server.url, delay_ms=5))
            shares[-1].attach(lm.store)
        threads = [threading.Thread(target=decode, args=(which,)) for which in answers]
        for thread in threads:
            thread.start()
        for _ in range(2):
            done = sum(map(len, answers.values()))
            wait_until(lambda done=done: sum(map(len, answers.values())) >= done + 12, 60)  # type: ignore[misc]
            server.kill()
            wait_until(lambda: all(share.error for share in shares))
            server.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert all(share.flush() for share in shares)
        stored = [texts_of(lm.store) for lm in lms]
        for share in shares:
            share.close()
    assert sorted(stored[0]) == sorted(stored[1])  # all answers of both, also those given while the server was away
    assert len(stored[0]) == len(set(stored[0])) == 60  # and none twice
    assert answers[0][-1] == reference(llama, prompts[29], 8)


def test_a_server_that_lost_its_data_is_read_from_its_start(server: RedisServer) -> None:
    (one, first), (two, second) = shared_store(server.url), shared_store(server.url)
    one.learn([[1, 2, 3]])
    assert first.flush()
    assert second.flush()
    server.kill()
    two.learn([[4, 5, 6]])  # waits for the server
    server.start()
    assert first.flush()
    assert second.flush()
    assert first.flush()
    assert texts_of(one) == texts_of(two) == [(1, 2, 3), (4, 5, 6)]


def test_entries_that_are_sent_twice_are_learned_once(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, first), (two, second) = shared_store(server.url), shared_store(server.url)
    answer, failures = first._server.exchange, [1]

    def lose_the_reply(*arguments):  # type: ignore[no-untyped-def]
        found = answer(*arguments)
        if arguments[0] and failures:
            failures.pop()
            raise OSError("the connection broke")
        return found

    monkeypatch.setattr(first._server, "exchange", lose_the_reply)
    one.learn([[1, 2, 3], [7, 8, 9]])
    wait_until(lambda: first.counts.published >= 2)
    assert second.flush()
    assert not failures
    assert second.counts.repeated >= 1
    assert texts_of(two) == [(1, 2, 3), (7, 8, 9)]


def test_a_saved_store_goes_on_where_it_was(server: RedisServer, tmp_path: Path) -> None:
    (one, first), (two, second) = shared_store(server.url), shared_store(server.url)
    one.learn([[1, 2, 3]])
    assert first.flush()
    assert second.flush()
    two.learn([[4, 5, 6]])
    two.save(tmp_path / "two.store")
    second.close()
    one.learn([[7, 8, 9]])
    assert first.flush()
    again, share = DraftStore(VOCAB), Share(server.url)
    again.load(tmp_path / "two.store")
    share.attach(again)
    assert share.flush()
    assert texts_of(again) == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    empty, share = shared_store(server.url)  # a replica without a file learns everything
    assert share.flush()
    assert sorted(texts_of(empty)) == sorted(texts_of(again))


def test_another_tokenizer_is_refused(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, other = byte_tokenizer(), byte_tokenizer()
    other.add_tokens(["new"])
    store, share = DraftStore(300, tokenizer), Share(server.url)
    share.attach(store)
    with pytest.raises(StoreError, match="used with another tokenizer: choose another namespace"):
        Share(server.url).attach(DraftStore(300, other))
    Share(server.url).attach(DraftStore(300, other), "of-the-other")
    import redis

    client = redis.Redis(port=server.port)
    for data in (
        encode(Record("ab" * 8, 1, 1, [1, 2, 3]), b"another!"),
        encode(Record("ab" * 8, 2, 1, [4, 5]), b"another!"),
        b"",
    ):
        client.xadd("lookfar:texts", {b"r": data})
    client.xadd("lookfar:texts", {b"unknown": b"field"})
    client.close()
    with caplog.at_level(logging.WARNING, "lookfar.sharing"):
        assert share.flush()
    assert share.counts.refused == 4
    assert not texts_of(store)
    refused = [message for message in caplog.messages if "refused" in message]
    assert len(refused) == 2  # one sentence for each reason
    assert "another tokenizer" in refused[0]


def test_another_tokenizer_is_found_out_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path)
    (one, first), other = shared_store(server.url), DraftStore(VOCAB + 1)
    wait_until(lambda: bool(first.error))
    try:
        with caplog.at_level(logging.WARNING, "lookfar.sharing"):
            server.start()
            wait_until(lambda: not first.error)
            second = Share(server.url)
            server.kill()
            second.attach(other)
            second.attach(store := DraftStore(VOCAB), "fine")
            server.start()
            Share(server.url).attach(DraftStore(VOCAB))  # the first to come back decides
            assert second.flush()
        assert any("used with another tokenizer" in message for message in caplog.messages)
        other.learn([[1, 2]])
        store.learn([[3, 4]])
        assert second.flush()
        assert second.counts.published == 1
        first.flush()
        assert not texts_of(one)
    finally:
        for share in list(share_module._shares):
            share.close()
        server.kill()


def test_passwords_and_users(tmp_path: Path) -> None:
    with RedisServer(tmp_path, requirepass="se:cret") as server:
        place = server.url.removeprefix("redis://")
        for url in (server.url, f"redis://:wrong@{place}", f"redis://nobody:wrong@{place}"):
            with pytest.raises(StoreError, match="refuses the login: check the user and password") as caught:
                shared_store(url)
            assert "wrong" not in str(caught.value)
        (one, first), (two, second) = (shared_store(f"redis://:se%3Acret@{place}") for _ in range(2))
        one.learn([[1, 2, 3]])
        assert first.flush()
        assert second.flush()
        assert texts_of(two) == [(1, 2, 3)]
        import redis

        admin = redis.Redis(port=server.port, password="se:cret")
        admin.acl_setuser("reader", enabled=True, passwords=["+p"], keys=["lookfar:*"], categories=["+@read"])
        admin.close()
        with pytest.raises(StoreError, match="does not let this user read and write"):
            shared_store(f"redis://reader:p@{place}")
        first.close()
        second.close()


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    try:
        subprocess.run(
            [*command.split(), "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("needs openssl")
    server = RedisServer(tmp_path, tls_cert_file=certificate, tls_key_file=key, tls_auth_clients="no")
    server.options |= {"tls_port": server.port, "tls_ca_cert_file": certificate}
    server.options["port"] = 0
    with server:
        url = f"rediss://localhost:{server.port}"
        (one, first), (two, second) = (shared_store(f"{url}?ssl_ca_certs={certificate}") for _ in range(2))
        one.learn([[1, 2, 3]])
        assert first.flush()
        assert second.flush()
        assert texts_of(two) == [(1, 2, 3)]
        _, unverified = shared_store(url)
        assert "cannot be used" in unverified.error  # its certificate is signed by nobody we know
        assert "certificate verify failed" in unverified.error
        for share in (first, second, unverified):
            share.close()


def test_a_server_that_starts_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path)
    with caplog.at_level(logging.WARNING, "lookfar.sharing"):
        (one, first), (two, second) = shared_store(server.url), shared_store(server.url)
        one.learn([[1, 2, 3]])
        time.sleep(0.3)
        assert first.error == second.error
        assert "decoding goes on without it, and it is tried again" in first.error
        assert len(caplog.messages) == 2  # one for each replica, however often it was tried
    with server:
        assert first.flush()
        assert second.flush()
        assert not first.error
        assert texts_of(two) == [(1, 2, 3)]
        first.close()
        second.close()


def test_other_replicas_are_at_most_so_many_milliseconds_behind(server: RedisServer) -> None:
    (one, first), (two, second) = (shared_store(server.url, delay_ms=40) for _ in range(2))
    assert first.flush()
    assert second.flush()
    delays = []
    for number in range(20):
        start = time.perf_counter()
        one.add([1, 2, number])
        wait_until(lambda number=number: len(texts_of(two)) > number)  # type: ignore[misc]
        delays.append(time.perf_counter() - start)
    assert sorted(delays)[15] < 0.06  # the machine may be busy


def test_nothing_is_published_without_remember(server: RedisServer, llama: PreTrainedModel) -> None:
    lm, share = lookfar.LM(llama, strategy="suffix+trie", remember=False), Share(server.url)
    share.attach(lm.store)
    lm.generate(random_prompts(8)[0], max_new_tokens=8)
    assert share.flush()
    assert share.counts.published == 0


def test_tenants_do_not_see_each_other(server: RedisServer) -> None:
    first, second = Share(server.url), Share(server.url)
    stores = {(share, name): DraftStore(VOCAB) for share in (first, second) for name in ("", "a", "b")}
    for (share, name), store in stores.items():
        share.attach(store, name)
    for number, name in enumerate(("", "a", "b")):
        stores[first, name].learn([[number, number]])
    assert first.flush()
    assert second.flush()
    for number, name in enumerate(("", "a", "b")):
        assert texts_of(stores[second, name]) == [(number, number)]
    for wrong in ("a b", "x" * 65, "a:b", "*"):
        with pytest.raises(StoreError, match="A namespace has at most 64"):
            first.attach(DraftStore(VOCAB), wrong)
    with pytest.raises(StoreError, match="shared already"):
        first.attach(DraftStore(VOCAB), "a")
    with pytest.raises(StoreError, match="shared already"):
        second.attach(stores[first, "a"], "c")


def test_branches_of_the_trie_are_shared(server: RedisServer, llama: PreTrainedModel) -> None:
    first, second = (lookfar.LM(llama, strategy="trie", budget=8) for _ in range(2))
    shares = Share(server.url), Share(server.url)
    for lm, share in zip((first, second), shares, strict=True):
        share.attach(lm.store)
    prompt = random_prompts(12)[0]
    first.generate(prompt, max_new_tokens=NEW)
    assert all(share.flush() for share in shares)
    ours, theirs = first.store.trie.counted(), second.store.trie.counted()
    assert sorted(ours.counts.tolist()) == sorted(theirs.counts.tolist())
    assert not texts_of(second.store)
    assert second.generate(prompt, max_new_tokens=NEW).stats.steps < NEW // 2


def test_everything_is_bounded(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one, first = shared_store(server.url, max_entries=200)
    one.learn([[1, 2]] * 900)
    assert first.flush()
    import redis

    with redis.Redis(port=server.port) as client:
        assert client.xlen("lookfar:texts") < 400  # about 200: the server drops whole blocks
    server.kill()
    wait_until(lambda: bool(first.error))
    one.learn([[3, 4]] * 3000)
    assert len(first._waiting) <= share_module.MAX_WAITING
    assert first.counts.dropped > 1000
    server.start()
    assert first.flush()
    store, share = shared_store(server.url)
    one.learn([range(50)] * 2 + [[1] * (2 * MAX_TOKENS + 5)])  # type: ignore[list-item]
    assert first.flush()
    assert share.flush()
    assert [len(text) for text in texts_of(store)[-3:]] == [MAX_TOKENS, MAX_TOKENS, 5]


def test_forgetting_keeps_sharing(server: RedisServer, llama: PreTrainedModel) -> None:
    lm, share = lookfar.LM(llama), Share(server.url)
    share.attach(lm.store)
    other, others = DraftStore(lm.store.vocab_size), Share(server.url)
    others.attach(other)
    lm.store.learn([[1, 2, 3]])
    assert share.flush()
    before = lm.store
    lm.forget()
    before.learn([[9, 9]])  # nobody uses it any more
    lm.store.learn([[4, 5, 6]])
    assert share.flush()
    assert others.flush()
    assert texts_of(lm.store) == [(4, 5, 6)]
    assert texts_of(other) == [(1, 2, 3), (4, 5, 6)]


def test_the_thread_ends_with_the_store_and_when_it_is_closed(server: RedisServer) -> None:
    def threads() -> int:
        return sum(thread.name == "lookfar-share" for thread in threading.enumerate())

    gc.collect()
    wait_until(lambda: threads() == 0)
    store, share = shared_store(server.url)
    assert threads() == 1
    del store, share
    wait_until(lambda: (gc.collect(), threads() == 0)[1])
    store, share = shared_store(server.url)
    share.close()
    share.close()
    wait_until(lambda: threads() == 0)
    store.learn([[1, 2]])
    assert not share.flush(0.1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_publishes_under_a_name_of_its_own(server: RedisServer) -> None:
    one, first = shared_store(server.url)
    one.learn([[1, 2, 3]])
    assert first.flush()
    if (child := os.fork()) == 0:
        code = 1
        try:
            one.learn([[4, 5, 6]])
            code = 0 if first.flush() else 2
        finally:
            os._exit(code)
    one.learn([[7, 8, 9]])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first.flush()
    two, second = shared_store(server.url)
    assert second.flush()
    assert sorted(texts_of(two)) == sorted(texts_of(one)) == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]


@pytest.mark.slow
def test_the_last_answer_of_a_program_is_published(server: RedisServer) -> None:
    program = (
        "from lookfar.retrieval.draft_store import DraftStore; from lookfar.sharing.share import Share; import sys\n"
        "store = DraftStore(100); Share(sys.argv[1]).attach(store); store.add([1, 2, 3])"
    )
    subprocess.run([sys.executable, "-c", program, server.url], check=True, timeout=60)
    store, share = shared_store(server.url)
    assert share.flush()
    assert texts_of(store) == [(1, 2, 3)]


@pytest.mark.parametrize(
    "url", ["", "localhost", "http://host", "redis://host?what=1", "redis://h:x", "redis://h:1?db=q"]
)
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(StoreError, match="looks like redis://user:password@host:6379"):
        Share(url)


def test_options_are_checked() -> None:
    for options in ({"delay_ms": 0}, {"max_entries": 1.5}, {"delay_ms": True}):
        with pytest.raises(ConfigError, match="whole number of at least 1"):
            Share("redis://localhost", **options)  # type: ignore[arg-type]


def test_the_client_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(StoreError, match=r"pip install 'lookfar\[redis\]'"):
        Share("redis://localhost")


def test_uses_are_kept_apart(server: RedisServer) -> None:
    (one, first), (two, second) = shared_store(server.url), shared_store(server.url)
    one.share([5, 6, 7], IN_TRIE)
    assert first.flush()
    assert second.flush()
    assert not texts_of(two)
    assert two.trie.size == 7  # 5 6 7, 6 7, 7


def test_a_full_server_is_tried_again(server: RedisServer) -> None:
    import redis

    (one, first), (two, second) = shared_store(server.url), shared_store(server.url)
    client = redis.Redis(port=server.port)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    one.learn([[1, 2, 3], [4, 5, 6]])
    wait_until(lambda: "maxmemory" in first.error)
    one.learn([[7, 8, 9]])  # the store goes on learning
    client.config_set("maxmemory", 0)
    client.close()
    assert first.flush(20)
    assert second.flush(20)
    assert texts_of(two) == texts_of(one) == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    assert not first.error
