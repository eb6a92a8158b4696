"""Streams: what `generate` returns, chunk by chunk; closing a stream frees its slot."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TextIteratorStreamer, TextStreamer

import lookfar
from families import tiny_model
from helpers import byte_tokenizer, random_prompts, wait_until
from lookfar import LM
from lookfar.errors import LookfarWarning, RequestError

TEXT = "Grüße aus 東京 🌍! "


@pytest.fixture(scope="module")
def lm() -> LM:
    tokenizer = byte_tokenizer()
    return LM(tiny_model("llama", torch.float32, vocab_size=len(tokenizer)), tokenizer)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3}, {"strategy": "none"}, {"regex": "[a-z]{9}é"}])
def test_chunks_add_up_to_the_completion(lm: LM, options: dict[str, Any]) -> None:
    done = lm.generate(TEXT, max_new_tokens=40, **options)
    chunks = list(lm.stream(TEXT, max_new_tokens=40, **options))
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
    assert [chunk.step for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert all(len(chunk.sources) == len(chunk.token_ids) and chunk.sources[-1] == "model" for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [done.finish_reason]
    assert chunks[-1].stats.tokens == len(done.token_ids)


def test_accepted_tokens_have_a_source(lm: LM) -> None:
    lm.generate(TEXT, max_new_tokens=30)
    chunks = list(lm.stream(TEXT, max_new_tokens=30))
    drafted = [source for chunk in chunks for source in chunk.sources[:-1]]
    assert drafted
    assert set(drafted) <= {"suffix", "store", "recycle"}


def test_chunks_come_with_their_statistics(lm: LM) -> None:
    """A chunk comes with its row counts, and the last one with the draft counts by source."""
    rows = 0
    for chunk in lm.stream(TEXT, max_new_tokens=30, budget=16):
        assert chunk.stats.rows >= rows + 1
        rows = chunk.stats.rows
        if chunk.finish_reason is not None:
            assert sum(counts.proposed for counts in chunk.stats.drafters.values()) == rows - chunk.stats.steps
            accepted = sum(counts.accepted for counts in chunk.stats.drafters.values())
            assert accepted == chunk.stats.tokens - chunk.stats.steps


def test_several_prompts_in_one_stream(lm: LM) -> None:
    prompts = ["abc", TEXT, "x"]
    expected = lm.generate(prompts, max_new_tokens=20)
    texts = ["", "", ""]
    for chunk in lm.stream(prompts, max_new_tokens=20):
        texts[chunk.index] += chunk.text
    assert texts == [done.text for done in expected]


def test_closing_a_stream_frees_its_slot(lm: LM) -> None:
    for _ in lm.stream(TEXT, max_new_tokens=200):
        assert not lm.engine.scheduler.is_idle
        break
    wait_until(lambda: lm.engine.scheduler.is_idle)  # the stream was dropped
    stream = lm.stream(["a", "b", "c"], max_new_tokens=200)
    next(stream)
    assert not lm.engine.scheduler.is_idle
    stream.close()
    assert lm.engine.scheduler.is_idle
    assert list(stream) == []
    with lm.stream(TEXT, max_new_tokens=200) as stream:
        next(stream)
    assert lm.engine.scheduler.is_idle


def test_a_stream_that_is_never_read_starts_nothing(lm: LM) -> None:
    before, added = lm.engine.add, []
    lm.engine.add = lambda *given: added.append(given) or before(*given)  # type: ignore[method-assign,func-returns-value]
    try:
        stream = lm.stream(TEXT, max_new_tokens=20)
        other = lm.stream(TEXT, max_new_tokens=20)
        assert lm.generate("abc", max_new_tokens=3).token_ids
        assert len(added) == 1  # the call alone
        del stream
        other.close()
        assert len(added) == 1
    finally:
        lm.engine.add = before  # type: ignore[method-assign]


def test_streams_and_calls_share_the_engine(lm: LM) -> None:
    """A stream that is read slowly delays no other call, and loses nothing."""
    expected = [lm.generate(text, max_new_tokens=30).token_ids for text in ("abc", TEXT, "zzz")]
    first, second = lm.stream("abc", max_new_tokens=30), lm.stream(TEXT, max_new_tokens=30)
    got = [list(next(first).token_ids), list(next(second).token_ids)]
    assert lm.generate("zzz", max_new_tokens=30).token_ids == expected[2]
    for tokens, stream in zip(got, (first, second), strict=True):
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert got == expected[:2]
    assert lm.engine.scheduler.is_idle


@pytest.mark.slow
def test_many_threads_at_once(lm: LM) -> None:
    texts = [f"prompt number {i}" for i in range(12)]
    expected = [lm.generate(text, max_new_tokens=15).token_ids for text in texts]
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        got[i] = [token for chunk in lm.stream(texts[i], max_new_tokens=15) for token in chunk.token_ids]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(12)] == expected


def test_mistakes_come_before_the_first_chunk(lm: LM) -> None:
    with pytest.raises(RequestError, match="max_new_tokens"):
        lm.stream(TEXT, max_new_tokens=-1)


def test_models_of_the_fallback_stream_too() -> None:
    tokenizer = byte_tokenizer()
    lm = LM(tiny_model("mamba", torch.float32, vocab_size=len(tokenizer)), tokenizer)
    for options in ({}, {"temperature": 1.2, "seed": 5}):
        with pytest.warns(LookfarWarning) if not lm._warned else _nothing():
            done = lm.generate(TEXT, max_new_tokens=12, **options)
        chunks = list(lm.stream(TEXT, max_new_tokens=12, **options))
        assert "".join(chunk.text for chunk in chunks) == done.text
        assert [t for chunk in chunks for t in chunk.token_ids] == done.token_ids
    torch.manual_seed(5)
    ids = torch.tensor([lm.encode(TEXT)])
    expected = lm.model.generate(ids, do_sample=True, temperature=1.2, max_new_tokens=12, pad_token_id=0)
    assert expected[0, ids.shape[1] :].tolist() == done.token_ids
    before = threading.active_count()
    stream = lm.stream(TEXT, max_new_tokens=10**6)
    next(stream)
    stream.close()
    assert threading.active_count() == before


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


# transformers' own streamers


def test_text_streamers_of_transformers(lm: LM, capsys: pytest.CaptureFixture[str]) -> None:
    model = lookfar.accelerate(copy.deepcopy(lm.model))
    inputs = lm.tokenizer(TEXT, return_tensors="pt")
    arguments = {**inputs, "max_new_tokens": 20, "pad_token_id": 0, "do_sample": False}
    lm.model.generate(**arguments, streamer=TextStreamer(lm.tokenizer, skip_prompt=True))
    expected = capsys.readouterr().out
    model.generate(**arguments, streamer=TextStreamer(lm.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == expected
    streamer = TextIteratorStreamer(lm.tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs={**arguments, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == expected.removesuffix("\n")
    thread.join()


# Stopping at text


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.filterwarnings("ignore::lookfar.errors.LookfarWarning")
def test_stop_strings_across_tokens(family: str) -> None:
    tokenizer = byte_tokenizer()
    lm = LM(tiny_model(family, torch.float32, vocab_size=len(tokenizer)), tokenizer)
    whole = lm.generate(TEXT, max_new_tokens=40)
    readable = [i for i in range(8, 36) if "\ufffd" not in tokenizer.decode(whole.token_ids[i : i + 3])]
    assert readable
    stop = tokenizer.decode(whole.token_ids[readable[0] : readable[0] + 3])
    ids = torch.tensor([lm.encode(TEXT)])
    expected = lm.model.generate(
        ids, max_new_tokens=40, pad_token_id=0, do_sample=False, stop_strings=[stop, "never"], tokenizer=tokenizer
    )[0, ids.shape[1] :].tolist()
    lm.generate(TEXT, max_new_tokens=40)  # so that the stop lies inside an accepted draft
    done = lm.generate(TEXT, max_new_tokens=40, stop_strings=[stop, "never"])
    assert done.token_ids == expected
    assert done.finish_reason == "stop"
    assert len(expected) < 40
    chunks = list(lm.stream(TEXT, max_new_tokens=40, stop_strings=[stop]))
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert chunks[-1].finish_reason == "stop"
    if family == "llama":
        fast = lookfar.accelerate(copy.deepcopy(lm.model))
        out = fast.generate(
            ids, max_new_tokens=40, pad_token_id=0, do_sample=False, stop_strings=stop, tokenizer=tokenizer
        )
        assert out[0, ids.shape[1] :].tolist() == expected
        batch = torch.cat([ids, ids.flip(1)])
        rules = {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": 2, "do_sample": False}
        rules |= {"attention_mask": torch.ones_like(batch), "stop_strings": stop, "tokenizer": tokenizer}
        same = [model.generate(batch, **rules) for model in (lm.model, fast)]
        assert torch.equal(*same)


# KV that is reused


def test_a_prompt_that_continues_an_answer_is_not_prefilled_again(llama: PreTrainedModel) -> None:
    lm = LM(llama, max_batch=2)
    text = random_prompts(20)[0]
    for turn in range(4):
        expected = LM(llama).generate(text, max_new_tokens=9).token_ids
        done = lm.generate(text, max_new_tokens=9, reuse=True)
        assert done.token_ids == expected
        if turn:
            assert done.stats.reused_tokens == len(text) - 5  # all but the answer's last token and what is new
        text = text + done.token_ids + random_prompts(4, seed=turn)[0]
    assert lm.generate(text, max_new_tokens=9).stats.reused_tokens == 0  # only when it is asked for
    done = lm.generate(text, max_new_tokens=9, reuse=True)
    assert done.stats.reused_tokens == len(text) - 1  # the same prompt again
    other = random_prompts(30, seed=9)[0]
    assert lm.generate(text[:10] + other, max_new_tokens=9, reuse=True).stats.reused_tokens == 10
    expected = LM(llama).generate(text[:10] + other, max_new_tokens=9).token_ids
    assert lm.generate(text[:10] + other, max_new_tokens=9, reuse=True).token_ids == expected


def test_an_answer_that_was_stopped_can_be_continued(llama: PreTrainedModel) -> None:
    lm = LM(llama)
    prompt = random_prompts(12)[0]
    stream = lm.stream(prompt, max_new_tokens=50, reuse=True)
    got = [token for _ in range(5) for token in next(stream).token_ids]
    stream.close()
    text = prompt + got + [5, 6]
    done = lm.generate(text, max_new_tokens=9, reuse=True)
    assert done.stats.reused_tokens >= len(prompt) + len(got) - 1
    assert done.token_ids == LM(llama).generate(text, max_new_tokens=9).token_ids


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_reused_after_a_failed_step(llama: PreTrainedModel, error: type[BaseException]) -> None:
    lm = LM(llama)
    prompt = random_prompts(12)[0]
    lm.generate(prompt, max_new_tokens=5)
    launch = lm.engine.runner.launch

    def broken(*arguments: Any) -> Any:
        launch(*arguments)
        raise error

    lm.engine.runner.launch = broken  # type: ignore[method-assign]
    with pytest.raises(error):
        lm.generate([*prompt, 7, 8], max_new_tokens=5, reuse=True)
    lm.engine.runner.launch = launch  # type: ignore[method-assign]
    done = lm.generate([*prompt, 7, 8], max_new_tokens=5, reuse=True)
    assert done.stats.reused_tokens == 0
    assert done.token_ids == LM(llama).generate([*prompt, 7, 8], max_new_tokens=5).token_ids


def test_nothing_is_reused_after_a_failed_admission(llama: PreTrainedModel, monkeypatch: Any) -> None:
    """A text that moves into a slot takes the place of one that was kept there."""
    lm = LM(llama, max_batch=2, strategy="none")  # drafts would decide which text ends first
    first, second = random_prompts(12, 14)
    lm.generate([first, second], max_new_tokens=5)
    copy = lm.engine.cache._copy

    def broken(*arguments: int) -> None:
        copy(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(lm.engine.cache, "_copy", broken)
    with pytest.raises(KeyboardInterrupt):
        lm.generate([*second, 5, 6], max_new_tokens=5, reuse=True)
    monkeypatch.setattr(lm.engine.cache, "_copy", copy)
    done = lm.generate([*first, 5, 6], max_new_tokens=9, reuse=True)
    assert done.token_ids == LM(llama).generate([*first, 5, 6], max_new_tokens=9).token_ids


def test_the_cache_grows_under_a_running_stream(llama: PreTrainedModel) -> None:
    prompts = random_prompts(9, 30, 50, 6)
    alone = [LM(llama, strategy="none").generate(p, max_new_tokens=40).token_ids for p in prompts]
    lm = LM(llama, strategy="none")
    first = lm.stream(prompts[0], max_new_tokens=40)
    got = list(next(first).token_ids)
    slots, capacity = lm.engine.cache.slots, lm.engine.cache.capacity
    assert [done.token_ids for done in lm.generate(prompts[1:], max_new_tokens=40)] == alone[1:]
    assert lm.engine.cache.slots > slots
    assert lm.engine.cache.capacity > capacity
    assert got + [token for chunk in first for token in chunk.token_ids] == alone[0]
