"""Drafters that want hidden states get those of every token of the text, whatever runs the steps."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch

from families import tiny_model
from helpers import flat_lm, random_prompts, reference
from lookfar.drafters.base import DraftContext, Drafter, Outcome, Proposal, Strategy
from lookfar.lm import LM
from lookfar.models.hidden_states import recorded
from lookfar.models.hooks import has_position_hooks

PROMPTS = random_prompts(24, 33, 5)
NEW = 12


@dataclass(frozen=True, eq=False)
class Watching(Strategy):
    """Drafts that are right or wrong at random, and the states that were seen, by text and position."""

    name: ClassVar[str] = "watching"
    texts: tuple[list[int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafters", [])

    def create(self, context: DraftContext) -> list[Drafter]:
        text = next(text for text in self.texts if text[: len(context.prompt)] == list(context.prompt))
        self.drafters.append(Watcher(text))  # type: ignore[attr-defined]
        return self.drafters[-1:]  # type: ignore[attr-defined]

    @property
    def max_rows(self) -> int:
        return 8


class Watcher:
    name = Watching.name
    wants_predictions = False
    wants_hidden = True

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.states: dict[int, torch.Tensor] = {}

    def propose(self, ids: Seq[int], limit: int) -> Proposal:
        rest, rng = self.text[len(ids) :][:limit], random.Random(len(ids))
        right = rest[: rng.randint(0, 3)]
        return Proposal.of([[(token + 1) % 90 for token in rest[:2]], [*right, 1]] if rest else [])

    def observe(self, ids: Seq[int], outcome: Outcome) -> None:
        hidden = outcome.hidden
        assert hidden is not None
        assert list(ids) == self.text[: len(ids)]
        assert hidden.end <= len(ids) - (1 if outcome.emitted else 0)
        for position, state in enumerate(hidden.since(0), hidden.start):
            if position in self.states:
                torch.testing.assert_close(self.states[position], state)
            self.states[position] = state
        assert len(hidden.since(hidden.end - 1)) == 1


@pytest.mark.parametrize("kind", ["llama", "llama graph", "mpt", "gpt_neo", "lfm2", "qwen3_next"])
def test_states_are_those_of_the_decoder(kind: str) -> None:
    family, _, graph = kind.partition(" ")
    model = tiny_model(family)
    lm = flat_lm(model) if graph else LM(model, prefill_chunk=16)
    vars(lm.engine.runner.model)["has_heads"] = True  # captured steps keep the states of models that can use them
    texts = tuple(prompt + reference(model, prompt, NEW) for prompt in PROMPTS)
    for prompts in (PROMPTS[:1], PROMPTS):
        strategy = Watching(texts)
        done = lm.generate(prompts, max_new_tokens=NEW, strategy=strategy)
        assert [one.token_ids for one in done] == [text[-NEW:] for text in texts[: len(prompts)]]
        assert any(one.stats.tokens_per_step > 1 for one in done)
        for watcher in strategy.drafters:  # type: ignore[attr-defined]
            with torch.no_grad():
                expected = model.get_decoder()(torch.tensor([watcher.text])).last_hidden_state[0]
            # The last token is never fed, nor are the last ones if they were accepted with the end.
            assert sorted(watcher.states) == list(range(len(watcher.states)))
            assert len(watcher.states) >= len(watcher.text) - 1 - 4
            for position, state in watcher.states.items():
                torch.testing.assert_close(state, expected[position])


def test_the_hook_sees_its_own_thread_only_and_counts_as_harmless() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad(), recorded(model) as states:
        assert states is not None
        other = Thread(target=model, args=(ids,))
        other.start()
        other.join()
        assert not states.calls
        found: Any = model(ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(states.calls[0], found)
        assert not has_position_hooks(model)
    model(ids)
    assert len(states.calls) == 1
    with recorded(model, wanted=False) as nothing:
        assert nothing is None
