"""Each drafter on its own: what it proposes from what it has observed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from families import tiny_model
from helpers import random_prompts, reference
from lookfar.core.tree import NO_TREE
from lookfar.drafters.base import DraftContext, Outcome, Predictions
from lookfar.drafters.draft_model import DraftModel, ModelDrafter, bind_draft_model
from lookfar.drafters.prompt_lookup import PromptLookup, PromptLookupDrafter
from lookfar.drafters.recycle import Recycle
from lookfar.drafters.suffix import Suffix, SuffixDrafter
from lookfar.drafters.trie import Trie, TrieDrafter
from lookfar.errors import ConfigError
from lookfar.retrieval.draft_store import DraftStore
from lookfar.retrieval.sources import DraftSources


def outcome(emitted: list[int], finished: bool = False, predictions: Predictions | None = None) -> Outcome:
    nothing = np.zeros(0, np.int64)
    return Outcome(emitted, NO_TREE, nothing, nothing, predictions, last=0, finished=finished)


def context(
    prompt: list[int], sources: DraftSources | None = None, new: int = 100, remember: bool = True
) -> DraftContext:
    return DraftContext(prompt, len(prompt) + new, sources or DraftSources(100), remember)


def kept(drafts: np.ndarray) -> list[list[int]]:
    return [[token for token in draft if token >= 0] for draft in drafts.tolist()]


def test_suffix_proposes_the_longest_and_the_latest_first() -> None:
    (own,) = Suffix(branches=3, length=2).create(context([1]))
    ids = [1, 2, 3, 20, 21, 9, 2, 3, 22, 23, 9, 3, 24, 25, 1, 2, 3]
    proposal = own.propose(ids, limit=10)
    assert kept(proposal.drafts) == [[20, 21], [22, 23], [24, 25]]
    assert (np.diff(proposal.scores) <= 0).all()
    assert proposal.scores[0] > proposal.scores[1] > proposal.scores[2]
    assert kept(own.propose(ids, limit=1).drafts) == [[20], [22], [24]]


def test_suffix_knows_the_beginning_of_a_prompt_that_is_longer_than_the_answer() -> None:
    prompt = list(range(10, 90))
    (own,) = Suffix(length=3).create(context(prompt, new=8))
    assert not len(own.propose(prompt, limit=9).drafts)
    assert kept(own.propose([*prompt, 10, 11], limit=9).drafts) == [[12, 13, 14]]


def test_an_answer_joins_the_store_when_it_is_finished() -> None:
    sources = DraftSources(100)
    prompt = list(range(10, 20))
    (stored,) = Suffix().create(context(prompt, sources))
    stored.observe([*prompt, 1, 2], outcome([1, 2]))
    assert sources.store.tokens == 0
    stored.observe([*prompt, 1, 2, 3], outcome([3], finished=True))
    (later,) = Suffix().create(context(prompt, sources))
    assert kept(later.propose(prompt, limit=5).drafts) == [[1, 2, 3]]


def test_each_draws_from_its_own_store_and_text() -> None:
    """Requests of several draft states may share a step."""
    states = [DraftSources(100), DraftSources(100)]
    states[0].store.learn([[1, 2, 3, 40, 41]])
    states[1].store.learn([[1, 2, 3, 50]])
    texts = [[1, 2, 3], [7, 2, 3], [2, 3, 60, 2, 3]]
    drafters = [Suffix(length=4).create(context(ids, s))[0] for ids, s in zip(texts, [*states, states[0]], strict=True)]
    found = SuffixDrafter.together(drafters).propose(texts, np.array([9, 9, 1], np.int32), 64)
    drafts = zip(found.owners.tolist(), found.sources.tolist(), kept(found.drafts), strict=True)
    assert sorted(drafts) == [(0, 1, [40, 41]), (1, 1, [50]), (2, 0, [60]), (2, 1, [40])]


def test_texts_of_requests_that_leave_nothing_behind() -> None:
    sources = DraftSources(100)
    (secret,) = Suffix().create(context([30, 31], sources, remember=False))
    before = sources.store.tokens
    secret.observe([30, 31, 32], outcome([32], finished=True))
    assert sources.store.tokens == before


def test_recycle_offers_what_it_was_shown() -> None:
    sources = DraftSources(100)
    (drafter,) = Recycle().create(context([1], sources))
    top = np.arange(16, dtype=np.int32).reshape(2, 8)
    rows = Predictions(np.array([-1, 3], np.int32), np.array([3, 4], np.int32), top, np.ones((2, 8), np.float32))
    drafter.observe([1], Outcome([], NO_TREE, *(np.zeros(0, np.int64),) * 2, rows, last=1))
    proposal = drafter.propose([1], limit=5)
    assert proposal.table is sources.recycle_table
    assert sources.recycle_table.arrays.token_ids[3].tolist() == top[0].tolist() + [-1] * 16
    assert proposal.runner_ups.tolist() == top[1, 1:].tolist()


def trie_drafter(settings: Trie, prompt: list[int], store: DraftStore, remember: bool = True) -> TrieDrafter:
    return TrieDrafter(settings, store, prompt, remember)


def test_the_trie_knows_prompt_and_outputs_and_says_which() -> None:
    store = DraftStore(100)
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
    store = DraftStore(100)
    first = trie_drafter(Trie(), [1, 2, 60, 61], store)
    assert kept(first.propose([1, 2, 60, 61, 1, 2], 9).drafts)[0][0] == 60
    second = trie_drafter(Trie(), [7, 8], store)
    assert not len(second.propose([7, 8, 1, 2], 9).drafts)
    assert store.trie.size == 1


def test_outputs_are_counted_as_soon_as_a_branch_is_whole_and_the_rest_at_the_end() -> None:
    store = DraftStore(100)
    settings = Trie(branch_length=3, match=2)
    drafter = trie_drafter(settings, [9], store)
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
    silent = trie_drafter(settings, [9], DraftStore(100), remember=False)
    silent.observe(text, outcome([1, 2, 3, 4, 5], finished=True))
    assert silent.store.trie.size == 1


def test_shorter_suffixes_fill_up_and_stop_words_are_no_keys() -> None:
    store = DraftStore(100)
    store.learn([[1, 2, 30], [5, 2, 31], [6, 2, 32]])
    settings = Trie(match=2)
    text = [9, 1, 2]
    proposal = trie_drafter(settings, [9], store).propose(text, 9)
    assert kept(proposal.drafts)[0] == [30]
    assert {path[0] for path in kept(proposal.drafts)} == {30, 31, 32}
    assert proposal.scores.tolist()[0] == 2
    stopped = trie_drafter(Trie(match=2, stop_words=(2,)), [9], store)
    assert kept(stopped.propose(text, 9).drafts) == [[30]]


def test_draft_shapes_and_lengths() -> None:
    store = DraftStore(100)
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


def test_a_draft_model_drafts_its_own_text_and_keeps_the_kv_of_accepted_drafts() -> None:
    small = tiny_model("llama")
    sources = DraftSources(small.config.vocab_size)
    strategy = DraftModel(model=small, length=3)
    (drafter,) = strategy.create(context([1], sources))
    assert isinstance(drafter, ModelDrafter)
    (prompt,) = random_prompts(8)
    text = reference(small, prompt, 9)
    fed: list[int] = []
    forward = drafter.model.forward
    drafter.model.forward = lambda plan, cache: fed.append(plan.width) or forward(plan, cache)  # type: ignore
    assert kept(drafter.propose(prompt, 9).drafts) == [text[:3]]
    assert fed == [8, 1, 1]
    # The first two drafts were right, then the text went elsewhere: only new tokens are fed.
    other = (text[2] + 1) % 90
    ids = [*prompt, *text[:2], other]
    assert kept(drafter.propose(ids, 2).drafts) == [reference(small, ids, 2)]
    assert fed == [8, 1, 1, 1, 1]
    (another,) = strategy.create(context([1], sources))
    assert another.model is drafter.model  # type: ignore[attr-defined]


def test_a_draft_model_that_does_not_fit() -> None:
    small = tiny_model("llama")
    with pytest.raises(ConfigError, match="smaller model of the same family"):
        bind_draft_model(small, DraftSources(small.config.vocab_size + 1))
    with pytest.raises(ConfigError, match="cannot draft"):
        bind_draft_model(tiny_model("mamba"), DraftSources(tiny_model("mamba").config.vocab_size))
    with pytest.raises(ConfigError, match="give the smaller model"):
        DraftModel()


def test_a_request_that_is_not_remembered_has_a_recycle_table_of_its_own() -> None:
    sources = DraftSources(100)
    (one,), (two,) = (Recycle().create(context([1], sources, remember=False)) for _ in range(2))
    rows = Predictions(
        *(np.array([x], np.int32) for x in (-1, 3)), np.array([[5, 6]], np.int32), np.ones((1, 2), np.float32)
    )
    one.observe([1], Outcome([], NO_TREE, *(np.zeros(0, np.int64),) * 2, rows, last=0))
    assert one.propose([1], 5).table.arrays.token_ids[3, 0] == 5  # type: ignore[union-attr]
    for other in (two.propose([1], 5).table, sources.recycle_table):
        assert other is not None
        assert (other.arrays.token_ids == -1).all()
