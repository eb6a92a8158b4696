"""What the ranks of a test do: `python scenarios.py NAME [ARGUMENT …]`, as every rank. Rank 0 prints one JSON line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from families import tiny_model
from helpers import oracle, random_prompts, reference
from lookfar.drafters.scripted import Scripted
from lookfar.errors import LookfarError, ModelError, RankError
from lookfar.lm import LM
from lookfar.parallel import attach, follow, load, use_ranks
from lookfar.parallel.follower import Follower
from lookfar.parallel.followers import Followers
from lookfar.parallel.group import Group
from lookfar.parallel.messages import Op
from lookfar.parallel.runner import ParallelRunner
from lookfar.ranks import find_ranks, own_rank

PROMPTS = random_prompts(9, 21, 14)
NEW = 24
SAMPLED = {"temperature": 1.3, "do_sample": True}
_group: list[Group] = []


def with_ranks(model: PreTrainedModel, work: Callable[[LM], Any], **options: Any) -> Any:
    """Do some work with an LM on rank 0, whose steps all ranks share; returns its result on rank 0."""
    if not _group:
        _group.append(Group(find_ranks("cpu"), 120.0))
    lm = LM(model, prefill_chunk=16, **options)
    if _group[0].rank:
        assert Follower(lm.engine.runner, _group[0]).run() == 0
        return None
    followers = Followers(_group[0])
    found = work(use_ranks(lm, followers))
    lm.driver.close()
    followers.end()
    return found


def sampled(model: PreTrainedModel, prompts: list[list[int]], seed: int) -> list[list[int]]:
    """The sampled tokens of `model.generate`, for one prompt or for several of one length."""
    torch.manual_seed(seed)
    ids = torch.tensor(prompts)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0, num_beams=1, **SAMPLED
    )
    return [row[ids.shape[1] :].tolist() for row in out]


def exact(*families: str) -> Any:
    """Whether the tokens of all strategies are those of `generate`, by family."""
    found = {}
    for family in families:
        model = tiny_model(family)
        found[family] = with_ranks(model, lambda lm, model=model: differences(lm, model))
    return found


def differences(lm: LM, model: PreTrainedModel) -> dict[str, Any]:
    """Compare greedy and sampled answers, alone and in batches, with those of `generate`."""
    answers = [reference(model, prompt, NEW) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    same_length = random_prompts(12, 12, seed=1)
    drawn, together = sampled(model, [PROMPTS[0]], 3)[0], sampled(model, same_length, 5)
    wrong = []
    for strategy in (oracle(texts), "auto", "lookahead", "suffix"):
        asked: Any = {"strategy": strategy, "max_new_tokens": NEW, "budget": 24 if strategy == "auto" else None}
        for index, prompt in enumerate(PROMPTS):
            if lm.generate(prompt, **asked).token_ids != answers[index]:
                wrong.append(f"{strategy} greedy {index}")
        if [done.token_ids for done in lm.generate(PROMPTS, **asked)] != answers:
            wrong.append(f"{strategy} batch")
        if isinstance(strategy, str):
            if lm.generate(PROMPTS[0], seed=3, **SAMPLED, **asked).token_ids != drawn:
                wrong.append(f"{strategy} sampled")
            if [done.token_ids for done in lm.generate(same_length, seed=5, **SAMPLED, **asked)] != together:
                wrong.append(f"{strategy} sampled batch")
    runner = lm.engine.runner
    assert isinstance(runner, ParallelRunner)
    counts = runner.counts
    return {"wrong": wrong, "steps": counts.steps, "bytes": counts.bytes, "kind": runner.name}


def life() -> Any:
    """Streams that are closed early, requests after one another, reuse, pauses, chunks, rules, and errors."""
    model = tiny_model("llama")
    return with_ranks(model, lambda lm: {name: test(lm, model) for name, test in LIFE.items()}, max_batch=2)


def close_early(lm: LM, model: PreTrainedModel) -> bool:
    for _ in range(3):
        with lm.stream(PROMPTS, max_new_tokens=NEW) as stream:
            next(stream)
    return right(lm, model) and right(lm, model)


def reuse_text(lm: LM, model: PreTrainedModel) -> bool:
    """A prompt that continues an earlier answer starts from its KV, on every rank."""
    first = lm.generate(PROMPTS[1], max_new_tokens=NEW, reuse=True).token_ids
    longer = [*PROMPTS[1], *first, *PROMPTS[0]]
    done = lm.generate(longer, max_new_tokens=NEW, reuse=True)
    return done.token_ids == reference(model, longer, NEW) and done.stats.reused_tokens >= len(PROMPTS[1])


def pause_and_resume(lm: LM, model: PreTrainedModel) -> bool:
    """A request that gives up its place goes on later."""
    (request,), _ = lm.requests(PROMPTS[0], max_new_tokens=NEW)
    engine, tokens = lm.engine, []
    handle = engine.add(request)
    for step in range(200):
        tokens += [token for output in engine.step() for token in output.tokens]
        if step == 2:
            engine.pause(handle)
            assert not engine.step()
            engine.resume(handle)
        if not engine.has_work:
            break
    engine.settle()
    return tokens == reference(model, PROMPTS[0], NEW)


def long_replay(lm: LM, model: PreTrainedModel) -> bool:
    """More accepted tokens than are fed again in one step."""
    new = 170
    answer = reference(model, PROMPTS[0], new)
    text = PROMPTS[0] + answer

    def script(ids: Any) -> list[list[int]]:
        rest = text[len(ids) :]
        return [[(rest[0] + 1) % 90], rest[:150]] if rest and list(ids) == text[: len(ids)] else []

    return lm.generate(PROMPTS[0], max_new_tokens=new, strategy=Scripted(script, 200)).token_ids == answer


def rules(lm: LM, model: PreTrainedModel) -> bool:
    """Processors that see the text run on rank 0, for every node that is reached."""
    asked: Any = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "max_new_tokens": NEW}
    ids = torch.tensor([PROMPTS[2]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, do_sample=False, **asked)
    return lm.generate(PROMPTS[2], **asked).token_ids == expected[0, len(PROMPTS[2]) :].tolist()


def failing_rank(lm: LM, model: PreTrainedModel) -> bool:
    """A step that fails on another rank ends the request with a sentence, and the next one runs."""
    lm.engine.runner.followers.post(Op.CAPTURE, 0, [1, 1, 1])  # which eager runners cannot do
    try:
        lm.generate(PROMPTS[0], max_new_tokens=NEW)
    except RankError as error:
        return str(error) == "Rank 1: NotImplementedError: Eager steps are not captured." and right(lm, model)
    return False


def measured_costs(lm: LM, model: PreTrainedModel) -> bool:
    """An automatic budget measures the steps of the group, and stays exact."""
    done = lm.generate(PROMPTS, max_new_tokens=NEW, budget="auto")
    assert lm.engine.speculator.costs is not None
    return [one.token_ids for one in done] == [reference(model, prompt, NEW) for prompt in PROMPTS]


def warm(lm: LM, model: PreTrainedModel) -> bool:
    lm.warmup(sampling=True)
    return right(lm, model)


def right(lm: LM, model: PreTrainedModel) -> bool:
    return all(
        lm.generate(prompt, max_new_tokens=NEW, budget=16).token_ids == reference(model, prompt, NEW)
        for prompt in PROMPTS
    )


LIFE: dict[str, Callable[[LM, PreTrainedModel], Any]] = {
    "close early": close_early,
    "reuse": reuse_text,
    "pause": pause_and_resume,
    "long replay": long_replay,
    "rules": rules,
    "a failing rank": failing_rank,
    "measured costs": measured_costs,
    "warm-up": warm,
}


def attached(family: str = "llama", other: str = "") -> Any:
    """`attach`, as a program would call it; rank 1 may have another model."""
    model = tiny_model(family)
    if own_rank() and other == "model":
        with torch.no_grad():
            next(iter(model.parameters())).add_(1e-3)
    lm = attach(LM(model), timeout=15.0, follows=other != "generates")
    if own_rank():
        lm.generate(PROMPTS[0])
    if other == "generates":
        follow(lm)
    if other == "changes":
        with torch.no_grad():
            next(iter(model.parameters())).add_(1e-3)
        with suppress(ModelError):  # the second request is refused like the first one
            lm.generate(PROMPTS[0], max_new_tokens=NEW)
    tokens = lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
    return {"right": tokens == reference(model, PROMPTS[0], NEW), "kind": lm.engine.runner.name}


def demo() -> Any:
    """The demo model: greedy, in a batch, with a window, and sampled."""
    lm = load("demo", device="cpu", budget=12)
    questions = ("Write a haiku about the sea.", "Repeat after me: the cat sat on the mat, the cat sat on the mat.")
    prompts = [lm.chat_ids([{"role": "user", "content": question}]) for question in questions]
    asked: Any = {"max_new_tokens": NEW}
    answers = [reference(lm.model, prompt, NEW) for prompt in prompts]
    drawn = sampled(lm.model, prompts[:1], 3)[0]
    return {
        "alone": [lm.generate(prompt, **asked).token_ids for prompt in prompts] == answers,
        "batch": [done.token_ids for done in lm.generate(prompts, **asked)] == answers,
        "window": lm.generate(prompts[0], strategy="lookahead", **asked).token_ids == answers[0],
        "sampled": lm.generate(prompts[0], seed=3, **SAMPLED, **asked).token_ids == drawn,
    }


def endless() -> Any:
    """Decode until a rank is gone."""
    lm = attach(LM(tiny_model("llama")), timeout=15.0)
    print("ready", flush=True)
    while True:
        lm.generate(PROMPTS, max_new_tokens=64)


if __name__ == "__main__":
    try:
        result = globals()[sys.argv[1]](*sys.argv[2:])
    except LookfarError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if result is not None and own_rank() == 0:
        print(json.dumps(result))
