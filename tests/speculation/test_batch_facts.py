"""Facts about a batch hold for the same requests in the same places of the KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lookfar.speculation.batch_facts import BatchFacts


def request(kv: int, **speculation: Any) -> Any:
    own = {"budget": "auto", "wants_predictions": False, "hidden_drafters": [], "drafters": [], **speculation}
    sampler, fields = SimpleNamespace(random=None), {"embeds": None, "position_offset": 0, "source": None}
    return SimpleNamespace(
        kv=kv, num_cached=3, prompt_pending=0, sampler=sampler, speculation=SimpleNamespace(**own), **fields
    )


def test_they_hold_until_a_request_comes_leaves_or_gets_another_place() -> None:
    one, two = request(1), request(2, drafters=["suffix"], wants_predictions=True)
    facts = BatchFacts([one, two])
    assert facts.are_of([one, two])
    assert not facts.are_of([two, one])
    assert not facts.are_of([one])
    assert facts.drafting == [1]
    assert facts.wants_predictions
    assert facts.decoding.handles == [1, 2]
    two.kv = 3  # it was paused and has come back
    assert not facts.are_of([one, two])


def test_prompts_are_over_once_they_were_fed() -> None:
    one = request(1)
    one.prompt_pending = 2
    facts = BatchFacts([one])
    assert facts.has_prompts()
    one.prompt_pending = 0
    assert not facts.has_prompts()
