"""The proposer for vLLM, called as vLLM calls it: what it drafts, and rows that are moved, reused and interrupted.

The texts were recorded with the demo model (benchmarks/vllm_replay.py).
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_replay import NGram, Replay, Text, vllm_config

from helpers import byte_tokenizer, wait_until
from lookfar.errors import ConfigError, StoreError
from lookfar.integrations.vllm import Proposer, RequestIds
from lookfar.integrations.vllm.row_texts import PATIENCE
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.suffix_index import END
from redis_server import RedisServer, needs_server

K = 5
RECORDED: dict[str, list[Text]] = {
    suite: [(prompt, output) for prompt, output in texts]
    for suite, texts in json.loads((Path(__file__).parent / "recorded_texts.json").read_text()).items()
}
ALL = [text for texts in RECORDED.values() for text in texts]


@pytest.fixture
def proposer() -> Proposer:
    return Proposer(vllm_config(K))


def replayed(proposer: Any, texts: list[Text], batch: int = 3, longest: int = K) -> Replay:
    replay = Replay(proposer, batch, longest)
    replay.run(texts)
    if isinstance(proposer, Proposer):
        assert not proposer.counts.failures
    return replay


def rate(replay: Replay) -> float:
    return replay.tokens / replay.steps


def call(proposer: Proposer, *rows: list[int], new: int = 1) -> list[list[int]]:
    """Propose for rows of tokens, the last of which were just sampled."""
    tokens = np.zeros((len(rows), max(map(len, rows)) + 8), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return proposer.propose([row[-new:] for row in rows], np.array([len(row) for row in rows]), tokens)


@pytest.mark.parametrize("longest", [3, 5, 8])
def test_more_tokens_are_accepted_than_by_copying_n_grams(longest: int) -> None:
    cold = warm = ngram = 0.0
    for texts in RECORDED.values():
        proposer = Proposer(vllm_config(longest))
        first = replayed(proposer, texts, longest=longest)
        proposer.texts.learn_all()
        cold, warm = cold + rate(first), warm + rate(replayed(proposer, texts, longest=longest))
        ngram += rate(replayed(NGram(longest), texts, longest=longest))
    assert cold > 1.02 * ngram
    assert warm / len(RECORDED) > 0.75 * (longest + 1)


def test_drafts_are_short_or_empty_when_nothing_is_likely(proposer: Proposer) -> None:
    rng = random.Random(0)
    texts = [([rng.randrange(200) for _ in range(100)], [rng.randrange(200) for _ in range(100)]) for _ in range(6)]
    replay = replayed(proposer, texts)
    assert replay.drafted / replay.steps < 0.5
    copied = replayed(NGram(K, 3, 1), texts)
    assert replay.drafted < 0.3 * copied.drafted


def test_counts_are_those_of_the_replay(proposer: Proposer) -> None:
    replay = replayed(proposer, ALL)
    counts = proposer.counts
    assert counts.rows == replay.steps
    assert replay.drafted <= counts.drafted  # drafts after the last token of a text are not verified
    finished_with = len(ALL) * K
    assert replay.tokens - replay.steps - finished_with <= counts.accepted <= replay.tokens - replay.steps
    assert "draft tokens accepted in a step" in counts.sentence(0)


def test_rows_may_be_moved_between_calls() -> None:
    texts = ALL[:6]

    class Shuffled(Proposer):
        """Sees the rows of every call in another order."""

        def propose(self, sampled, lengths, tokens, **_):  # type: ignore[no-untyped-def]
            order = list(range(len(sampled)))
            random.Random(int(lengths.sum())).shuffle(order)
            found = super().propose([sampled[i] for i in order], lengths[order], tokens[order])
            return [found[order.index(i)] for i in range(len(order))]

    plain, shuffled = Proposer(vllm_config(K)), Shuffled(vllm_config(K))
    one, other = replayed(plain, texts), replayed(shuffled, texts)
    assert abs(rate(one) - rate(other)) < 0.1  # learning sees the rows in another order
    for proposer in (plain, shuffled):
        proposer.texts.learn_all()
        assert proposer.counts.texts == len(texts)  # no row was taken for a new request


def test_a_row_that_is_reused_starts_anew(proposer: Proposer) -> None:
    call(proposer, [1, 2, 3, 4, 1, 2])
    assert call(proposer, [11, 12, 13, 14, 15, 16, 17]) == [[]]  # as long as the other one would be now
    assert call(proposer, [5, 6, 7, 5, 6, 7, 5])[0][:2] == [6, 7]
    for text in proposer.texts._present.values():
        assert text.index.text.tolist() == [5, 6, 7, 5, 6, 7, 5]


def test_requests_that_wait_go_on_with_their_text(proposer: Proposer) -> None:
    waiting, busy = [1, 2, 3, 4, 5, 1, 2], [20, 21, 22]
    call(proposer, waiting, busy)
    text = next(iter(proposer.texts._present.values()))
    for _ in range(PATIENCE):
        busy = [*busy, 23]
        call(proposer, busy)
    call(proposer, [*busy, 23], [*waiting, 3])  # in another row
    assert text in proposer.texts._present.values()
    assert text.index.text.tolist() == [*waiting, 3]
    busy = [*busy, 23]
    for _ in range(PATIENCE + 2):
        busy = [*busy, 23]
        call(proposer, busy)
    assert not proposer.texts._away
    assert proposer.counts.texts == 1


def test_a_text_is_learned_when_it_leaves_the_batch_and_then_only_what_is_new(proposer: Proposer) -> None:
    answer = list(range(100, 300))
    call(proposer, [1, 2, 3], [20])
    call(proposer, [1, 2, 3, *answer], [20, 21], new=2)
    assert proposer.store.tokens == 0
    call(proposer, [20, 21, 22])
    assert proposer.store.index.text.tolist() == [1, 2, 3, *answer, END]
    call(proposer, [20, 21, 22, 23], [1, 2, 3, *answer, 4])
    call(proposer, [20, 21, 22, 23, 24])
    assert proposer.store.index.text.tolist() == [1, 2, 3, *answer, END, *answer[-64:], 4, END]
    assert proposer.counts.texts == 1


def test_an_idle_engine_shares_its_last_answers(proposer: Proposer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.integrations.vllm.proposer.IDLE_SECONDS", 0.02)
    Thread(target=proposer._share_when_idle, daemon=True).start()
    call(proposer, [1, 2, 3, 4])
    wait_until(lambda: proposer.store.tokens == 4)
    call(proposer, [1, 2, 3, 4, 5])  # the request goes on
    wait_until(lambda: proposer.store.tokens == 9)
    assert proposer.counts.texts == 1


def test_nothing_is_kept_without_remember() -> None:
    proposer = Proposer(vllm_config(K, remember=False))
    replayed(proposer, ALL[:3])
    proposer.texts.learn_all()
    assert proposer.store.tokens == 0
    assert not len(proposer.chains.pool.arrays.token_ids)


def test_rows_without_a_token_and_full_rows_get_no_draft() -> None:
    proposer = Proposer(vllm_config(K, max_model_len=12))
    tokens = np.tile(np.array([1, 2, 3], np.int32), (3, 8))
    found = proposer.propose([[], [3], [3]], np.array([6, 9, 12]), tokens, slot_mappings=None, more="of a new version")
    assert found[0] == found[2] == []
    assert found[1] == [1, 2]  # there is room for these and the next token
    assert proposer.propose([], np.zeros(0, np.int64), tokens) == []
    assert proposer.propose([[], []], np.array([3, 3]), tokens) == [[], []]
    assert not proposer.counts.failures


def test_ids_outside_the_vocabulary_are_never_drafted() -> None:
    proposer = Proposer(vllm_config(K, vocab_size=10))
    assert call(proposer, [1, 2, 50, 3, 1, 2]) == [[]]
    assert call(proposer, [1, 2, -1, 3, 1, 2]) == [[]]
    assert not proposer.counts.failures


def test_an_error_costs_drafts_and_nothing_else(
    proposer: Proposer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "vllm.lookfar"):
        patch.setattr(proposer.chains, "propose", broken)
        assert call(proposer, [1, 2, 3, 1, 2]) == [[]]
        patch.setattr(proposer.texts, "match", broken)
        assert call(proposer, [1, 2, 3, 1, 2]) == [[]]
    assert len(caplog.messages) == 1
    assert proposer.counts.failures == 2
    assert call(proposer, [1, 2, 3, 1, 2])[0][:1] == [3]


def test_request_ids_come_through_the_worker_extension(proposer: Proposer, caplog: pytest.LogCaptureFixture) -> None:
    worker = RequestIds()
    worker.model_runner = SimpleNamespace(drafter=None)
    assert not worker.give_request_ids()
    batch = SimpleNamespace(req_ids=["a", "b", "c", None])
    worker.model_runner = SimpleNamespace(drafter=proposer, input_batch=batch)
    assert worker.give_request_ids()
    worker.model_runner.drafter = SimpleNamespace(user_proposer=proposer)  # as some versions wrap it
    assert worker.give_request_ids()
    call(proposer, [1, 2, 3], [1, 2, 3])
    assert list(proposer.texts._present) == ["a", "b"]
    batch.req_ids = ["b", "a"]
    texts = dict(proposer.texts._present)
    call(proposer, [1, 2, 3, 4], [1, 2, 3, 5])
    assert proposer.texts._present == texts
    assert texts["a"].index.text.tolist() == [1, 2, 3, 5]
    del batch.req_ids  # another version
    with caplog.at_level(logging.WARNING, "vllm.lookfar"):
        call(proposer, [1, 2, 3, 5, 6], [1, 2, 3, 4, 6])
    assert "recognises requests by their text" in caplog.text
    assert set(proposer.texts._present) == {0, 1}
    assert set(proposer.texts._present.values()) == set(texts.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_probability": 0}, "between 0 and 1"),
        ({"min_probability": "high"}, "min_probability must be a number"),
        ({"remember": 1}, "remember must be true or false"),
        ({"unknown": 1}, "no setting 'unknown': use min_probability, remember, store, share"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Proposer(vllm_config(K, **settings))


def test_a_number_of_tokens_is_needed_and_other_settings_are_not() -> None:
    config = vllm_config(K)
    config.additional_config = None
    Proposer(config)
    config.additional_config = {"lookfar": 3}
    with pytest.raises(ConfigError, match="holds names and values"):
        Proposer(config)
    config.additional_config = {"another plugin": {}}
    config.speculative_config.num_speculative_tokens = None
    with pytest.raises(ConfigError, match="Give num_speculative_tokens"):
        Proposer(config)


def test_loading_compiles_and_leaves_nothing_behind(proposer: Proposer) -> None:
    proposer.load_model(None)
    assert proposer.counts.calls == proposer.store.tokens == 0
    assert not proposer.texts._present
    assert not proposer.chains.pool.arrays.token_ids.max() >= 0


def test_counters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    proposer = Proposer(vllm_config(K, log_seconds=1e-9))
    with caplog.at_level(logging.INFO, "vllm.lookfar"):
        call(proposer, [1, 2, 3, 1, 2])
    assert "draft tokens accepted in a step" in caplog.text


def test_a_store_file_of_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    made, path = DraftStore(258, tokenizer), tmp_path / "a.store"
    made.learn("the quick brown fox jumps")
    made.save(path)
    config = vllm_config(K, vocab_size=258, store=str(path))
    config.model_config.tokenizer = str(tmp_path / "tokenizer")
    proposer = Proposer(config)
    ids = tokenizer("the quick brown fox jumps", add_special_tokens=False).input_ids
    assert call(proposer, ids[:12])[0] == ids[12 : 12 + K]
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(StoreError, match="another tokenizer"):
        Proposer(config)


@needs_server
def test_engines_share_what_they_learn(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with RedisServer(tmp_path) as server:
        config = vllm_config(K, share=server.url, namespace="vllm")
        config.model_config.tokenizer = str(tmp_path / "tokenizer")
        first, second = Proposer(config), Proposer(config)
        config.parallel_config = SimpleNamespace(rank=1, tensor_parallel_size=2)
        assert Proposer(config).share is None  # the first of its tensor-parallel group shares
        config.parallel_config = SimpleNamespace(rank=2, tensor_parallel_size=2)
        third = Proposer(config)
        cold = rate(replayed(first, ALL[:6]))
        first.texts.learn_all()
        for proposer in (first, second, third):
            assert proposer.share is not None
            assert proposer.share.flush()
        assert second.share is not None
        assert second.share.counts.received == 6
        assert rate(replayed(second, ALL[:6])) > 2 * cold
        for proposer in (first, second, third):
            assert proposer.share is not None
            proposer.share.close()
