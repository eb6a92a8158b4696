"""The prefix cache against a plain dictionary of texts, and requests that start from it."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from families import DEVICE, tiny_model
from helpers import eager_engine, random_prompts, reference
from lookfar.core.ids import common_prefix
from lookfar.core.packed_kv import PackedKV
from lookfar.drafters.registry import parse_strategy
from lookfar.engine.request import KVOptions, Request
from lookfar.kvcache.prefix_cache import MIN_TOKENS, PrefixCache
from lookfar.lm import LM
from lookfar.testing import run_requests

BYTES = 2 * 2 * 3 * 4  # of a token below: keys and values, two heads, three numbers of four bytes


def kv_of(tokens: list[int], start: int, end: int) -> PackedKV:
    """KV in which every position says which text it belongs to."""
    marks = torch.tensor([hash(tuple(tokens[: i + 1])) % 997 for i in range(start, end)], dtype=torch.float32)
    keys = marks[None, :, None].expand(2, -1, 3)
    return PackedKV((torch.stack([keys, keys + 0.5]),), end - start)


def texts(rng: random.Random, count: int) -> list[list[int]]:
    """Texts that branch at few places."""
    made = [[rng.randrange(50) for _ in range(30)]]
    for _ in range(count - 1):
        old = rng.choice(made)
        cut = rng.randrange(len(old))
        made.append(old[:cut] + [rng.randrange(50) for _ in range(rng.randrange(1, 40))])
    return made


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_known_beginning_is_found_with_its_kv(seed: int) -> None:
    rng = random.Random(seed)
    cache, known = PrefixCache(1 << 30), {"a": [], "b": []}  # type: ignore[var-annotated]
    for text in texts(rng, 60):
        name = rng.choice("ab")
        for space in "ab":
            length = max((common_prefix(old, text) for old in known[space]), default=0)
            found = cache.find(space, text)
            assert (found.length if found is not None else 0) == (length if length >= MIN_TOKENS else 0)
            if found is not None:
                assert torch.equal(found.blocks[0], kv_of(text, 0, length).blocks[0])
        cache.add(name, text, lambda start, end, text=text: kv_of(text, start, end))  # type: ignore[misc]
        if len(text) >= MIN_TOKENS:
            known[name].append(text)
    distinct = {(s, tuple(t[: i + 1])) for s in "ab" for t in known[s] for i in range(len(t))}
    assert len(cache) == len(distinct)
    assert cache.nbytes == BYTES * len(distinct)


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(100 * BYTES)
    system = list(range(40))
    for i in range(20):
        text = [*system, *range(100 + 20 * i, 120 + 20 * i)]
        cache.add("", text, lambda start, end, text=text: kv_of(text, start, end))  # type: ignore[misc]
        assert cache.nbytes <= cache.max_bytes
        found = cache.find("", text)
        assert found is not None
        assert found.length == 60
    assert cache.evictions == 17
    oldest = cache.find("", [*system, *range(100, 120)])
    assert oldest is not None
    assert oldest.length == 40  # the beginning that all share is still there
    cache.add("", list(range(500, 700)), lambda start, end: kv_of(list(range(500, 700)), start, end))
    assert cache.find("", list(range(500, 700))) is None  # larger than the whole cache
    cache.clear()
    assert cache.nbytes == len(cache) == 0


def request(prompt: list[int], namespace: str = "", strategy: str = "auto") -> Request:
    kv = KVOptions(reuse=True, namespace=namespace)
    return Request(prompt, 16, strategies=parse_strategy(strategy), budget=8, kv=kv)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt_neox"])
def test_requests_that_start_from_a_prefix_emit_the_same_tokens(family: str) -> None:
    model = tiny_model(family)
    engine = eager_engine(model, prefill_chunk=16, max_batch=3)
    engine.share_prefixes(1 << 24)
    system, *tails = random_prompts(40, 5, 9, 12, 7)
    prompts = [system + tail for tail in tails]
    expected = [reference(model, prompt, 16) for prompt in prompts]
    (first,) = run_requests(engine, [request(prompts[0])])
    results = run_requests(engine, [request(prompt) for prompt in prompts[1:]])
    assert [first.token_ids, *(one.token_ids for one in results)] == expected
    assert [one.stats.reused_tokens for one in results] == [40, 40, 40]
    going_on = prompts[0] + first.token_ids + tails[1]
    (again,) = run_requests(engine, [request(going_on)])
    assert again.stats.reused_tokens == len(prompts[0]) + 15  # the last emitted token was never fed
    assert again.token_ids == reference(model, going_on, 16)


def test_namespaces_do_not_share_prefixes(llama: PreTrainedModel) -> None:
    engine = eager_engine(llama, prefill_chunk=16)
    engine.share_prefixes(1 << 24)
    (prompt,) = random_prompts(40)
    reused = [run_requests(engine, [request(prompt, name)])[0].stats.reused_tokens for name in ("a", "b", "a", "", "")]
    assert reused == [0, 0, 39, 0, 39]


def test_a_request_that_runs_shares_its_prompt(llama: PreTrainedModel) -> None:
    engine = eager_engine(llama, prefill_chunk=64, max_batch=2)
    engine.share_prefixes(1 << 24)
    (prompt,) = random_prompts(40)
    engine.add(request(prompt, strategy="none"))
    engine.step()
    engine.add(request([*prompt, 5], strategy="none"), index=1)
    outputs = [output for _ in range(30) for output in engine.step()]
    reused = {output.index: output.reused_tokens for output in outputs}
    assert reused == {0: 0, 1: 40}


def test_requests_with_one_prompt_read_it_once(llama: PreTrainedModel) -> None:
    engine = eager_engine(llama, prefill_chunk=32, max_batch=4)
    engine.share_prefixes(1 << 24)
    prompt, other = random_prompts(100, 100)
    results = run_requests(engine, [request(one) for one in (prompt, prompt, other, prompt)])
    assert [one.stats.reused_tokens for one in results] == [0, 99, 0, 99]
    expected = reference(llama, prompt, 16)
    assert [results[i].token_ids for i in (0, 1, 3)] == [expected] * 3
    assert results[2].token_ids == reference(llama, other, 16)


def test_a_prompt_whose_reader_is_cancelled_is_read_by_the_next(llama: PreTrainedModel) -> None:
    engine = eager_engine(llama, prefill_chunk=32, max_batch=4)
    engine.share_prefixes(1 << 24)
    (prompt,) = random_prompts(100)
    first = engine.add(request(prompt))
    engine.add(request(prompt), index=1)
    engine.step()
    assert len(engine.scheduler.running) == 1
    engine.cancel(first)
    outputs = [output for _ in range(40) for output in engine.step()]
    assert outputs[-1].result is not None
    assert outputs[-1].result.token_ids == reference(llama, prompt, 16)


def test_changed_weights_forget_the_prefixes() -> None:
    lm = LM(tiny_model("llama"), budget=8)
    lm.engine.share_prefixes(1 << 24)
    (prompt,) = random_prompts(40)
    before = lm.generate(prompt, max_new_tokens=8, reuse=True)
    assert lm.generate(prompt, max_new_tokens=8, reuse=True).stats.reused_tokens == 39
    with torch.no_grad():
        lm.model.lm_head.weight.mul_(-1)
        lm.model.model.embed_tokens.weight.mul_(0.5)
    after = lm.generate(prompt, max_new_tokens=8, reuse=True)
    assert after.stats.reused_tokens == 0
    assert after.token_ids == reference(lm.model, prompt, 8) != before.token_ids


@pytest.mark.gpu
def test_exact_half_precision_is_the_same_with_and_without_prefixes() -> None:
    model = tiny_model("llama", torch.bfloat16, hidden_size=128, head_dim=32)
    system, *tails = random_prompts(200, 5, 90, 33)
    plain = LM(model, exact=True)
    expected = [plain.generate(system + tail, max_new_tokens=64).token_ids for tail in tails]
    shared = LM(model, exact=True, budget=16)
    shared.engine.share_prefixes(1 << 28)
    assert DEVICE != "cpu"
    for _ in range(2):
        found = [shared.generate(system + tail, max_new_tokens=64, reuse=True) for tail in tails]
        assert [one.token_ids for one in found] == expected
    assert all(one.stats.reused_tokens > 190 for one in found)
