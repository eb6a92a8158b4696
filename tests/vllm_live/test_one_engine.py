"""The proposer inside vLLM on a CPU, with the demo model: output, request ids, stores, errors, counters."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING or find_spec("vllm") is not None:
    from vllm_live.engines import Engine, prompts, speculation

from lookfar.models.demo import demo_model
from lookfar.retrieval.draft_store import DraftStore

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in an environment of its own: make vllm-test"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.real,
]


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts()


@pytest.fixture(scope="module")
def plain(asked: list[list[int]]) -> list[list[int]]:
    """What vLLM answers without speculation."""
    with Engine(demo_model()) as engine:
        return engine.tokens(asked)


def test_the_output_is_that_of_plain_decoding(
    asked: list[list[int]], plain: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(asked) == 40
    with Engine(demo_model(), {"log_seconds": 0.5}) as engine:
        assert engine.llm.collective_rpc("give_request_ids") == [True]
        assert engine.tokens(asked) == plain
        cold = engine.metric("num_accepted_tokens")
        (counts,) = engine.counts()
        assert counts["failures"] == 0
        assert counts["drafted"] >= engine.metric("num_draft_tokens") > engine.metric("num_accepted_tokens")
        assert 0.95 * cold <= counts["accepted"] <= cold  # those of the last step of a request are not seen
        assert engine.tokens(asked) == plain
        warm = engine.metric("num_accepted_tokens") - cold
        assert warm > 0.6 * sum(map(len, plain))
        (counts,) = engine.counts()
        assert counts["texts"] >= 72  # but for the last batch
    assert "draft tokens accepted in a step" in capfd.readouterr().out


def test_requests_are_recognised_without_ids(asked: list[list[int]], plain: list[list[int]]) -> None:
    with Engine(demo_model(), {}) as engine:
        assert engine.tokens(asked) == plain
        assert engine.tokens(asked[:1]) == plain[:1]
        (counts,) = engine.counts()
        assert counts["texts"] == 40  # no row was taken for a new request
        assert counts["failures"] == 0


def test_drafts_from_a_store_file(asked: list[list[int]], plain: list[list[int]], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    store = DraftStore(49_152, tokenizer)
    for prompt, answer in zip(asked[:12], plain, strict=False):
        store.add([*prompt[-64:], *answer])
    store.save(tmp_path / "answers.store")
    with Engine(demo_model(), {"store": str(tmp_path / "answers.store"), "remember": False}) as engine:
        assert engine.tokens(asked[:12]) == plain[:12]
        (counts,) = engine.counts()
        assert counts["accepted"] > 0.6 * sum(map(len, plain[:12]))
        assert counts["texts"] == 0


def test_errors_cost_drafts_and_nothing_else(
    asked: list[list[int]], plain: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    failing = speculation("vllm_live.failing_proposer.FailingProposer")
    with Engine(demo_model(), {}, speculative_config=failing) as engine:
        assert engine.tokens(asked[:16]) == plain[:16]
        (counts,) = engine.counts()
        assert counts["failures"] >= counts["calls"] // 3 > 10
        assert counts["accepted"] > 0
        assert engine.metric("num_accepted_tokens") >= counts["accepted"]
    out = capfd.readouterr()
    assert (out.out + out.err).count("lookfar cannot draft") == 1


def test_a_wrong_setting_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        Engine(demo_model(), {"min_probability": 2})
    out = capfd.readouterr()
    assert "min_probability must lie between 0 and 1, not 2" in out.out + out.err
