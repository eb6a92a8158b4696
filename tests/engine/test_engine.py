"""The engine, stepped in one thread: every tree, ragged batches, chunked prefills, stops inside a step, capacity."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from families import tiny_model
from helpers import eager_engine, random_prompts, reference
from lookfar import LM
from lookfar.core import host_team
from lookfar.core.host_team import HostTeam, sharing_work
from lookfar.drafters.base import DraftContext, Drafter, Strategy
from lookfar.drafters.jacobi import Jacobi
from lookfar.drafters.lookahead import Lookahead
from lookfar.drafters.registry import auto_strategies
from lookfar.drafters.scripted import Scripted, ScriptedDrafter
from lookfar.engine.engine import Engine
from lookfar.engine.outputs import StepOutput
from lookfar.engine.request import KVOptions, Request
from lookfar.errors import CapacityError, ConfigError
from lookfar.sampling.sampler import SamplingParams
from lookfar.testing import run_requests

PROMPTS = random_prompts(20, 33, 5, 1)
NEW = 24


@pytest.fixture(scope="module")
def expected(llama: PreTrainedModel) -> list[list[int]]:
    return [reference(llama, prompt, NEW) for prompt in PROMPTS]


def knows(texts: list[list[int]], depth: int) -> Strategy:
    """A drafter that knows the next `depth` tokens."""

    def script(ids: Seq[int]) -> list[list[int]]:
        return [next(text for text in texts if text[: len(ids)] == list(ids))[len(ids) :][:depth]]

    return Scripted(script)


def texts_of(expected: list[list[int]]) -> list[list[int]]:
    return [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]


def requests(*strategies: Strategy, new: int = NEW, stop: Seq[int] = ()) -> list[Request]:
    return [Request(prompt, new, frozenset(stop), strategies) for prompt in PROMPTS]


def test_a_full_match_is_followed_by_a_bonus_token(engine: Engine, expected: list[list[int]]) -> None:
    done = run_requests(engine, requests(knows(texts_of(expected), depth=3), new=NEW))
    for result, tokens in zip(done, expected, strict=True):
        assert result.token_ids == tokens
        assert result.stats.step_sizes == [4] * (NEW // 4)
        assert result.stats.drafter("scripted").accepted == 3 * (NEW // 4)


def test_without_speculation_a_step_is_one_token_and_one_row(engine: Engine, expected: list[list[int]]) -> None:
    done = run_requests(engine, requests())
    assert [result.token_ids for result in done] == expected
    assert all(result.stats.step_sizes == [1] * NEW for result in done)
    assert all(result.stats.rows_per_step == 1 for result in done)


def test_wrong_drafts_cost_nothing_but_rows(engine: Engine, expected: list[list[int]]) -> None:
    nonsense = Scripted(lambda ids: [[ids[-1], ids[0]], [3, 4, 5, 6]])
    done = run_requests(engine, requests(nonsense))
    assert [result.token_ids for result in done] == expected


def test_threads_that_share_the_host_work_change_nothing(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 17 requests beside others that decode: trees, look-ups and lessons are shared by four threads."""
    prompts = random_prompts(*range(1, 34, 2))

    def run(threads: int) -> list[tuple[list[int], list[int], int]]:
        team = HostTeam(threads - 1)
        monkeypatch.setattr(host_team, "_team", team)
        engine = eager_engine(llama, max_batch=7, prefill_chunk=9)
        with sharing_work():
            done = run_requests(
                engine, [Request(prompt, NEW, strategies=auto_strategies(), budget=9) for prompt in prompts]
            )
        team.close()
        return [(result.token_ids, result.stats.step_sizes, result.stats.rows) for result in done]

    alone = run(1)
    assert run(4) == alone
    assert [tokens for tokens, _, _ in alone] == [reference(llama, prompt, NEW) for prompt in prompts]


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Random drafts: each follows the truth for a while (−1 stands for the true token) and then leaves it."""
    right = st.lists(st.just(-1), max_size=5)
    wrong = st.lists(st.integers(3, 89), max_size=3)
    drafts = draw(st.lists(st.tuples(right, wrong).map(lambda parts: parts[0] + parts[1]), min_size=1, max_size=5))
    return drafts, draw(st.integers(1, 12))


@pytest.mark.slow
@given(scripts(), st.sampled_from([1, 3, 16, 512]))
@settings(max_examples=40, deadline=None)
def test_any_tree_shape_is_exact_alone_and_in_a_batch(drawn: tuple[list[list[int]], int], prefill_chunk: int) -> None:
    shapes, rows = drawn
    model = _model_for_property()
    truth = [prompt + tokens for prompt, tokens in zip(PROMPTS, _expected_for_property(), strict=True)]

    def script(ids: Seq[int]) -> list[list[int]]:
        rest = next(text for text in truth if text[: len(ids)] == list(ids))[len(ids) :]
        drafts = [[rest[i] if t == -1 and i < len(rest) else max(t, 3) for i, t in enumerate(d)] for d in shapes]
        turn = len(ids) % len(drafts)
        return drafts[turn:] + drafts[:turn]

    engine = eager_engine(model, max_batch=3, prefill_chunk=prefill_chunk)
    todo = [Request(prompt, 10, strategies=(Scripted(script, rows),)) for prompt in PROMPTS]
    batch = run_requests(engine, todo)
    assert [s.token_ids for s in batch] == [tokens[:10] for tokens in _expected_for_property()]
    assert [run_requests(engine, [one])[0].token_ids for one in todo] == [s.token_ids for s in batch]
    assert all(s.stats.rows <= s.stats.steps * (1 + rows) for s in batch)


_cache: dict[str, object] = {}


def _model_for_property() -> PreTrainedModel:
    # qwen2 here: one layer with a sliding window, one without.
    return _cache.setdefault("model", tiny_model("qwen2"))  # type: ignore[return-value]


def _expected_for_property() -> list[list[int]]:
    if "expected" not in _cache:
        _cache["expected"] = [reference(_model_for_property(), prompt, 10) for prompt in PROMPTS]
    return _cache["expected"]  # type: ignore[return-value]


@pytest.mark.parametrize("prefill_chunk", [1, 2, 7, 16, 512])
def test_chunked_prefills(llama: PreTrainedModel, expected: list[list[int]], prefill_chunk: int) -> None:
    engine = eager_engine(llama, prefill_chunk=prefill_chunk)
    for strategy in (Jacobi(), Lookahead(window=3, ngram=3, guesses=3)):
        assert [s.token_ids for s in run_requests(engine, requests(strategy))] == expected


def test_a_prefill_chunk_needs_the_logits_of_one_row(llama: PreTrainedModel) -> None:
    shapes = []
    handle = llama.lm_head.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[:2])))
    try:
        run_requests(eager_engine(llama, prefill_chunk=8), [Request(random_prompts(30)[0], 2)])
    finally:
        handle.remove()
    assert shapes == [(1, 1)] * 5  # three chunks, the rest of the prompt with the first token, the second token


def test_window_rows_below_the_top_need_no_logits(llama: PreTrainedModel) -> None:
    rows = []
    handle = llama.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    try:
        run_requests(eager_engine(llama), [Request(PROMPTS[0], 12, strategies=(Lookahead(4, 4, 0),))])
    finally:
        handle.remove()
    # Warm-up: the last token and level 0, then the top of a growing window; later the last token and the top level.
    # The last step emits the last token, so it needs no window.
    assert rows[-12:] == [6, 6, *[5] * 9, 1]  # on a CPU, a self-check precedes them


def test_more_requests_than_slots_and_rows_that_finish_early(llama: PreTrainedModel) -> None:
    prompts = random_prompts(4, 30, 2, 17, 9, 25, 3, 11)
    lengths = [3, 20, 9, 1, 15, 6, 12, 2]
    engine = eager_engine(llama, max_batch=3, prefill_chunk=16)
    todo = [
        Request(prompt, new, strategies=(Lookahead(3, 3, 3),)) for prompt, new in zip(prompts, lengths, strict=True)
    ]
    widths = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan, cache: widths.append(plan.batch) or launch(plan, cache)  # type: ignore
    done = run_requests(engine, todo)
    assert [s.token_ids for s in done] == [reference(llama, p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert max(widths) == 3
    assert widths[-1] == 1  # finished requests leave the batch
    assert engine.scheduler.is_idle


def test_a_stop_token_in_the_middle_of_a_step_ends_everything_there(engine: Engine, expected: list[list[int]]) -> None:
    tokens = expected[0]
    stop = tokens[9]
    cut = tokens[: tokens.index(stop) + 1]
    seen: list[int] = []
    request = Request(PROMPTS[0], NEW, frozenset([stop, 95]), (knows(texts_of(expected), depth=7),))
    done = run_requests(engine, [request], lambda output: seen.extend(output.tokens))[0]
    assert done.token_ids == cut == seen
    # The stop token was a draft token; neither its KV nor that of later ones is kept.
    assert engine.cache._retained == {0: PROMPTS[0] + cut[:-1]}
    assert done.finish_reason == "stop"
    assert done.stats.tokens == len(cut)


def test_nothing_is_emitted_past_max_new_tokens(engine: Engine, expected: list[list[int]]) -> None:
    for new in (1, 2, 5):
        done = run_requests(engine, requests(knows(texts_of(expected), depth=9), new=new))
        assert [s.token_ids for s in done] == [tokens[:new] for tokens in expected]
        assert all(s.finish_reason == "length" and s.stats.steps == 1 for s in done)


def test_drafters_see_what_happened(engine: Engine, expected: list[list[int]]) -> None:
    kept: list[ScriptedDrafter] = []

    class Watched(Scripted):
        def create(self, context: DraftContext) -> list[Drafter]:
            kept.append(ScriptedDrafter(self.script))
            return [kept[-1]]

    truth = expected[0]

    def script(ids: Seq[int]) -> list[list[int]]:
        done = len(ids) - len(PROMPTS[0])
        return [[truth[done], (truth[done + 1] + 1) % 90]]

    done = run_requests(engine, [Request(PROMPTS[0], 12, strategies=(Watched(script),))])[0]
    assert done.token_ids == truth[:12]
    outcomes = kept[0].seen
    assert [o.emitted for o in outcomes] == [truth[i : i + 2] for i in range(0, 12, 2)]
    assert [o.finished for o in outcomes] == [False] * 5 + [True]
    for i, outcome in enumerate(outcomes):
        start = 2 * i
        assert outcome.along([truth[start]]) == truth[start : start + 2]
        assert outcome.along([(truth[start] + 1) % 90]) == truth[start : start + 1]


def test_several_strategies_share_one_tree(engine: Engine, expected: list[list[int]]) -> None:
    both = (Jacobi(block=3), Lookahead(window=3, ngram=3, guesses=2), knows(texts_of(expected), depth=2))
    done = run_requests(engine, requests(*both))
    assert [s.token_ids for s in done] == expected
    assert all(s.stats.tokens_per_step > 2 for s in done)
    assert set(done[0].stats.drafters) == {"jacobi", "lookahead", "scripted"}


def test_processors_see_every_nodes_own_prefix(llama: PreTrainedModel) -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    llama.generation_config.repetition_penalty = 1.8
    try:
        truth = [reference(llama, prompt, NEW) for prompt in PROMPTS]
    finally:
        llama.generation_config.repetition_penalty = None
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8)])
    drafter = knows([prompt + tokens for prompt, tokens in zip(PROMPTS, truth, strict=True)], depth=5)
    sampling = SamplingParams(processors)
    todo = [Request(prompt, NEW, strategies=(drafter,), sampling=sampling) for prompt in PROMPTS]
    done = run_requests(eager_engine(llama), todo)
    assert [s.token_ids for s in done] == truth
    assert all(s.stats.step_sizes == [6] * 4 for s in done)


def test_capacity_is_known_before_decoding(llama: PreTrainedModel) -> None:
    engine = eager_engine(llama, max_length=50)
    calls = []
    engine.runner.launch = lambda plan, cache: calls.append(plan)  # type: ignore
    with pytest.raises(
        CapacityError, match=r"20 tokens and max_new_tokens is 31, but 51 do not fit in 50, the max_length: raise it"
    ):
        run_requests(engine, [Request(PROMPTS[2], 4), Request(PROMPTS[0], 31)])
    assert not calls
    with pytest.raises(
        CapacityError, match=r"257 do not fit in 256, the most that this model has positions for: lower max_new_tokens"
    ):
        run_requests(eager_engine(llama), [Request(PROMPTS[3], 256)])


def test_the_whole_length_can_be_used() -> None:
    """Window rows reach past the last learned position; that must neither fail nor change a token."""
    model = tiny_model("gpt2", n_positions=40, max_position_embeddings=40)
    engine = eager_engine(model)
    assert engine.max_length == 40
    done = run_requests(engine, [Request(PROMPTS[0], 20, strategies=(Lookahead(6, 5, 4),)), Request(PROMPTS[2], 35)])
    assert [s.token_ids for s in done] == [reference(model, PROMPTS[0], 20), reference(model, PROMPTS[2], 35)]


def test_the_cache_grows_with_what_is_asked_and_is_reused(engine: Engine) -> None:
    run_requests(engine, [Request(PROMPTS[0], 4)])
    first = engine.cache.buffers.generation
    assert (engine.cache.slots, engine.cache.capacity) == (1, 64)
    run_requests(engine, [Request(PROMPTS[2], 4)])
    assert engine.cache.buffers.generation == first
    run_requests(engine, requests(new=100))
    assert (engine.cache.slots, engine.cache.capacity) == (4, 192)
    run_requests(engine, [Request(PROMPTS[2], 200)])  # a long one alone does not pay for four
    assert (engine.cache.slots, engine.cache.capacity) == (1, 256)


def test_memory_of_a_smaller_cache_is_free_at_once(engine: Engine) -> None:
    gc.disable()  # on a GPU it cannot be waited for
    try:
        run_requests(engine, [Request(PROMPTS[0], 4)])
        for reuse in (False, True):  # without the old contents, and with them
            keys = weakref.ref(engine.cache.buffers.layers[0].keys)
            run_requests(engine, [Request(PROMPTS[0], engine.cache.capacity, kv=KVOptions(reuse=reuse))])
            assert keys() is None
    finally:
        gc.enable()


def test_an_error_in_a_callback_leaves_the_engine_usable(engine: Engine, expected: list[list[int]]) -> None:
    def broken(output: StepOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_requests(engine, requests(), broken)
    assert engine.scheduler.is_idle
    assert [s.token_ids for s in run_requests(engine, requests())] == expected


def test_no_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.engine.request.ROOM", 10**14)  # otherwise the KV cache grows with the answer
    model = tiny_model("llama", max_position_embeddings=10**15)
    with pytest.raises(CapacityError, match="There is no memory for the KV cache of 1 requests"):
        run_requests(eager_engine(model), [Request(PROMPTS[0], 10**14)])


@pytest.mark.parametrize("bad", [{"max_batch": 0}, {"max_length": -1}, {"prefill_chunk": 0}, {"max_batch": 1.5}])
def test_bad_limits_are_refused(llama: PreTrainedModel, bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
        eager_engine(llama, **bad)


def test_float32_and_the_fast_experts() -> None:
    model = tiny_model("mixtral", dtype=torch.float32)
    truth = [reference(model, prompt, NEW) for prompt in PROMPTS]
    done = run_requests(eager_engine(model), requests(Lookahead(3, 3, 3)))
    assert [s.token_ids for s in done] == truth


def test_the_users_model_is_left_as_it_was(llama: PreTrainedModel, engine: Engine) -> None:
    before = dict(vars(llama.config))
    run_requests(engine, requests(Lookahead(3, 3, 3)))
    assert dict(vars(llama.config)) == before
    assert not any(module._forward_pre_hooks for module in llama.modules())
    ids = torch.tensor([PROMPTS[0]], device=llama.device)
    loss = llama(ids, labels=ids).loss
    loss.backward()  # nothing inside became an inference tensor
    llama.zero_grad()


def test_drafts_and_window_rows_together_keep_to_the_reserved_rows(engine: Engine, expected: list[list[int]]) -> None:
    """A drafter that proposes too much must not push window rows past the reserved positions."""
    many = Scripted(lambda ids: [[first, *range(3, 12)] for first in range(3, 40)], rows=2)
    request = Request(PROMPTS[0], NEW, strategies=(many, Lookahead(window=5, ngram=4, guesses=0)))
    done = run_requests(engine, [request])[0]
    assert done.token_ids == expected[0]
    assert done.stats.rows <= done.stats.steps * (1 + request.max_draft_rows)


@pytest.mark.slow
def test_the_kv_cache_grows_with_long_answers(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.engine.request.ROOM", 4)
    prompts = random_prompts(12, 70, 5, 33)
    expected = [reference(llama, prompt, 150) for prompt in prompts]
    for strategy in ("none", "auto", "lookahead"):
        lm = LM(llama, strategy=strategy, max_batch=3)
        assert [done.token_ids for done in lm.generate(prompts, max_new_tokens=150)] == expected
        assert lm.engine.cache.capacity >= 150
        assert lm.engine.scheduler.is_idle


def test_a_limit_that_is_never_reached_reserves_no_memory() -> None:
    model = tiny_model("bloom")  # without a limit of its own
    prompt = random_prompts(12)[0]
    expected = reference(model, prompt, 30)
    stop = expected[20]
    lm = LM(model)
    done = lm.generate(prompt, max_new_tokens=10**9, eos_token_id=stop)
    assert done.token_ids == expected[: expected.index(stop) + 1]
    assert lm.engine.cache.capacity < 10_000


def test_an_answer_that_outgrows_the_memory_ends_alone(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookfar.engine.request.ROOM", 4)
    lm = LM(llama, strategy="none", max_batch=2)
    resize = lm.engine.cache.buffers.resize

    def limited(slots: int, capacity: int) -> None:
        if capacity > 128:
            raise CapacityError("There is no memory.")
        resize(slots, capacity)

    monkeypatch.setattr(lm.engine.cache.buffers, "resize", limited)
    short = random_prompts(5)[0]
    stream = lm.stream(random_prompts(12)[0], max_new_tokens=200)
    next(stream)
    assert lm.generate(short, max_new_tokens=40).token_ids == reference(llama, short, 40)
    with pytest.raises(CapacityError, match="There is no memory"):
        list(stream)
    assert lm.engine.scheduler.is_idle
