"""Each drafter on its own: what it proposes from what it has seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from conftest import random_prompts, reference
from families import tiny_model
from lookfar.config import DraftModel, PromptLookup, Recycle, Suffix, Trie
from lookfar.drafters.base import Outcome, Predictions
from lookfar.drafters.draft_model import ModelDrafter, bind
from lookfar.drafters.prompt_lookup import PromptLookupDrafter
from lookfar.drafters.trie import TrieDrafter
from lookfar.errors import ConfigError
from lookfar.memory import Memory
from lookfar.sequence import Request
from lookfar.store import Store
from lookfar.tree import NO_TREE


def outcome(emitted: list[int], finished: bool = False, predictions: Predictions | None = None) -> Outcome:
    nothing = np.zeros(0, np.int64)
    return Outcome(emitted, NO_TREE, nothing, nothing, predictions, last=0, finished=finished)


def kept(drafts: np.ndarray) -> list[list[int]]:
    return [[token for token in draft if token >= 0] for draft in drafts.tolist()]


def test_suffix_proposes_the_longest_and_the_latest_first() -> None:
    own, stored = Suffix(branches=3, length=2).start(Request([1], 100), Memory(100))
    ids = [1, 2, 3, 20, 21, 9, 2, 3, 22, 23, 9, 3, 24, 25, 1, 2, 3]
    proposal = own.propose(ids, limit=10)
    assert kept(proposal.drafts) == [[20, 21], [22, 23], [24, 25]]
    assert (np.diff(proposal.grades) <= 0).all()
    assert proposal.grades[0] > proposal.grades[1] > proposal.grades[2]
    assert kept(own.propose(ids, limit=1).drafts) == [[20], [22], [24]]
    assert not len(stored.propose(ids, limit=10).drafts)


def test_suffix_knows_the_beginning_of_a_prompt_that_is_longer_than_the_answer() -> None:
    prompt = list(range(10, 90))
    own, _ = Suffix(length=3).start(Request(prompt, 8), Memory(100))
    assert not len(own.propose(prompt, limit=9).drafts)
    assert kept(own.propose([*prompt, 10, 11], limit=9).drafts) == [[12, 13, 14]]


def test_an_answer_joins_the_store_when_it_is_finished() -> None:
    memory = Memory(100)
    prompt = list(range(10, 20))
    _, stored = Suffix().start(Request(prompt, 100), memory)
    stored.observe([*prompt, 1, 2], outcome([1, 2]))
    assert memory.store.tokens == 0
    stored.observe([*prompt, 1, 2, 3], outcome([3], finished=True))
    _, later = Suffix().start(Request(prompt, 100), memory)
    assert kept(later.propose(prompt, limit=5).drafts)[0] == [1, 2, 3]
    _, secret = Suffix().start(Request([30, 31], 100, remember=False), memory)
    before = memory.store.tokens
    secret.observe([30, 31, 32], outcome([32], finished=True))
    assert memory.store.tokens == before


def test_recycle_offers_what_it_was_shown() -> None:
    memory = Memory(100)
    (drafter,) = Recycle().start(Request([1], 100), memory)
    top = np.arange(16, dtype=np.int32).reshape(2, 8)
    rows = Predictions(np.array([-1, 3], np.int32), np.array([3, 4], np.int32), top, np.ones((2, 8), np.float32))
    drafter.observe([1], Outcome([], NO_TREE, *(np.zeros(0, np.int64),) * 2, rows, last=1))
    proposal = drafter.propose([1], limit=5)
    assert proposal.successors is memory.successors
    assert memory.successors.tables.token_ids[3].tolist() == top[0].tolist() + [-1] * 16
    assert proposal.runners.tolist() == top[1, 1:].tolist()


def trie_drafter(config: Trie, prompt: list[int], store: Store, remember: bool = True) -> TrieDrafter:
    return TrieDrafter(config, store, prompt, remember)


def test_the_trie_knows_prompt_and_outputs_and_says_which() -> None:
    store = Store(100)
    store.learn([[1, 2, 30, 31], [1, 2, 30, 31], [1, 2, 40]])
    prompt = [1, 2, 50, 51, 9, 1, 2]
    both = trie_drafter(Trie(branch_length=4), prompt, store)
    assert kept(both.propose(prompt, 9).drafts)[0] == [30, 31]
    assert [50, 51, 9, 1] in kept(both.propose(prompt, 9).drafts)
    only_prompt = kept(trie_drafter(Trie(source="prompt"), prompt, store).propose(prompt, 9).drafts)
    assert {path[0] for path in only_prompt} == {50}
    only_output = kept(trie_drafter(Trie(source="output"), prompt, store).propose(prompt, 9).drafts)
    assert {path[0] for path in only_output} == {30, 40}


def test_prompts_do_not_leak_into_other_requests() -> None:
    store = Store(100)
    first = trie_drafter(Trie(), [1, 2, 60, 61], store)
    assert kept(first.propose([1, 2, 60, 61, 1, 2], 9).drafts)[0][0] == 60
    second = trie_drafter(Trie(), [7, 8], store)
    assert not len(second.propose([7, 8, 1, 2], 9).drafts)
    assert store.trie.size == 1


def test_outputs_are_counted_as_soon_as_a_branch_is_whole_and_the_rest_at_the_end() -> None:
    store = Store(100)
    config = Trie(branch_length=3, match=2)
    drafter = trie_drafter(config, [9], store)
    text = [9, 1, 2, 3, 4, 5]

    def counted() -> list[tuple[int, int]]:
        tokens, parents, _ = store.trie.counted()
        return sorted((int(t), int(c)) for t, p, c in zip(tokens, parents, _, strict=True) if p == 0)

    drafter.observe(text[:3], outcome([1, 2]))
    assert counted() == []
    drafter.observe(text[:5], outcome([3, 4]))
    assert counted() == [(1, 1)]
    drafter.observe(text, outcome([5], finished=True))
    assert counted() == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]  # each place once, the prompt's not
    silent = trie_drafter(config, [9], Store(100), remember=False)
    silent.observe(text, outcome([1, 2, 3, 4, 5], finished=True))
    assert silent.store.trie.size == 1


def test_shorter_suffixes_fill_up_and_stop_words_are_no_keys() -> None:
    store = Store(100)
    store.learn([[1, 2, 30], [5, 2, 31], [6, 2, 32]])
    config = Trie(match=2)
    text = [9, 1, 2]
    proposal = trie_drafter(config, [9], store).propose(text, 9)
    assert kept(proposal.drafts)[0] == [30]
    assert {path[0] for path in kept(proposal.drafts)} == {30, 31, 32}
    assert proposal.grades.tolist()[0] == 2
    stopped = trie_drafter(Trie(match=2, stop_words=(2,)), [9], store)
    assert kept(stopped.propose(text, 9).drafts) == [[30]]


def test_draft_shapes_and_lengths() -> None:
    store = Store(100)
    store.learn([[1, 10, 11, 12]] * 5 + [[1, 10, 20, 21]] * 3 + [[1, 30, 31, 32]] * 2)
    text = [9, 1]
    drafts = {
        shape: kept(trie_drafter(Trie(shape=shape, match=1), [9], store).propose(text, 9).drafts)
        for shape in ("hierarchical", "parallel", "single")
    }
    assert drafts["hierarchical"] == [[10, 11, 12], [10, 20, 21], [30, 31, 32]]
    assert drafts["single"] == [[10, 11, 12]]
    small = trie_drafter(Trie(shape="parallel", decoding_length=7, match=1), [9], store)
    assert kept(small.propose(text, 9).drafts) == [[10, 11, 12], [10, 20, 21]]
    short = trie_drafter(Trie(branch_length=2, match=1), [9], store)
    assert all(len(path) <= 2 for path in kept(short.propose(text, 9).drafts))
    few = kept(trie_drafter(Trie(decoding_length=2, match=1), [9], store).propose(text, 9).drafts)
    assert few == [[10, 11]]


@given(st.lists(st.integers(0, 4), min_size=3, max_size=40), st.integers(1, 3), st.integers(1, 8))
@settings(max_examples=100)
def test_prompt_lookup_is_that_of_transformers(ids: list[int], ngram: int, length: int) -> None:
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=length, max_matching_ngram_size=ngram, max_length=10_000, vocab_size=100
    )
    found = theirs.get_candidates(torch.tensor([ids]))[0][0, len(ids) :].tolist()
    ours = kept(PromptLookupDrafter(PromptLookup(length=length, ngram=ngram)).propose(ids, limit=100).drafts)
    assert (ours[0] if ours else []) == found


def test_a_draft_model_guesses_its_own_text_and_keeps_what_was_right() -> None:
    small = tiny_model("llama")
    memory = Memory(small.config.vocab_size)
    drafter = ModelDrafter(DraftModel(model=small, length=3), bind(small, memory), capacity=100)
    (prompt,) = random_prompts(8)
    text = reference(small, prompt, 9)
    fed: list[int] = []
    forward = drafter.model.forward
    drafter.model.forward = lambda plan, cache: fed.append(plan.width) or forward(plan, cache)  # type: ignore
    assert kept(drafter.propose(prompt, 9).drafts) == [text[:3]]
    assert fed == [8, 1, 1]
    # The first two guesses were right, then the text went elsewhere: only what is new is fed.
    other = (text[2] + 1) % 90
    ids = [*prompt, *text[:2], other]
    assert kept(drafter.propose(ids, 2).drafts) == [reference(small, ids, 2)]
    assert fed == [8, 1, 1, 1, 1]
    assert bind(small, memory) is drafter.model


def test_a_draft_model_that_does_not_fit() -> None:
    small = tiny_model("llama")
    with pytest.raises(ConfigError, match="smaller model of the same family"):
        bind(small, Memory(small.config.vocab_size + 1))
    with pytest.raises(ConfigError, match="cannot guess"):
        bind(tiny_model("mamba"), Memory(tiny_model("mamba").config.vocab_size))
    with pytest.raises(ConfigError, match="give the smaller model"):
        DraftModel()
