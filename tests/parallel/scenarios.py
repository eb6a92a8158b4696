"""What the ranks of a test do: `python scenarios.py NAME [ARGUMENT …]`, as every rank. Rank 0 prints one JSON line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from families import tiny_model
from helpers import oracle, random_prompts, reference
from lookfar.lm import LM
from lookfar.parallel import use_ranks
from lookfar.parallel.follower import Follower
from lookfar.parallel.followers import Followers
from lookfar.parallel.group import Group
from lookfar.parallel.runner import ParallelRunner
from lookfar.ranks import find_ranks

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


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[2:])
    if result is not None and _group[0].rank == 0:
        print(json.dumps(result))
