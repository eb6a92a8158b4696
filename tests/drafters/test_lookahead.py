"""Lookahead Decoding against the paper: the layout row by row, warm-up, harvest, slide and pool."""

from __future__ import annotations

import numpy as np
import pytest

from lookfar.core.plan import RequestPlan
from lookfar.core.tree import NO_TREE, DraftTree
from lookfar.drafters.base import Outcome
from lookfar.drafters.lookahead import Lookahead, LookaheadDrafter, NgramPool

N, W = 4, 5
LAST_TOKEN, P = 100, 30  # the current token and its position


def window() -> LookaheadDrafter:
    """A drafter past its warm-up with a window whose tokens say where they are: 10 × level + column."""
    drafter = LookaheadDrafter(Lookahead(window=W, ngram=N, guesses=2, from_prompt=False), [LAST_TOKEN])
    drafter.levels = [[10 * 0 + j for j in range(1, W)]] + [[10 * level + j for j in range(W)] for level in (1, 2)]
    return drafter


def outcome(window_choices: list[int], last_choice: int = 0, emitted: list[int] | None = None) -> Outcome:
    return Outcome(emitted or [last_choice], NO_TREE, np.array([last_choice]), np.array(window_choices))


def test_the_step_layout_row_by_row() -> None:
    drafter = window()
    drafter.pool.add(LAST_TOKEN, (51, 52, 53))
    drafter.pool.add(LAST_TOKEN, (51, 62, 63))
    proposal = drafter.propose([1, 2, LAST_TOKEN], limit=100)
    tree = DraftTree.from_paths(proposal.drafts.tolist())
    rows = RequestPlan(np.array([LAST_TOKEN]), P, tree=tree, windows=(proposal.window,))

    # What the paper says, written down independently: name → (token, position, the other rows it sees).
    expected: dict[str, tuple[int, int, set[str]]] = {"last": (LAST_TOKEN, P, set())}
    # Two n-grams of N−1 tokens that share their first token, each causal within itself.
    expected["g51"] = (51, P + 1, {"last"})
    expected["g62"] = (62, P + 2, {"last", "g51"})
    expected["g63"] = (63, P + 3, {"last", "g51", "g62"})
    expected["g52"] = (52, P + 2, {"last", "g51"})
    expected["g53"] = (53, P + 3, {"last", "g51", "g52"})
    for j in range(1, W):  # level 0: the columns up to its own; column 0 is the current token
        expected[f"0.{j}"] = (j, P + j, {"last"} | {f"0.{i}" for i in range(1, j)})
    for level in (1, 2):  # above: level 0 up to the own column, then the own column only
        for j in range(W):
            seen = {"last"} | {f"0.{i}" for i in range(1, j + 1)} | {f"{below}.{j}" for below in range(1, level)}
            expected[f"{level}.{j}"] = (10 * level + j, P + level + j, seen)

    # The most recent n-gram comes first, and the shared token is fed once: (W + 2)(N − 1) − 1 rows.
    names = list(expected)
    assert len(rows) == len(names) == (W + 2) * (N - 1) - 1
    for row, name in enumerate(names):
        token, position, seen = expected[name]
        assert rows.tokens[row] == token, name
        assert rows.positions[row] == position, name
        assert {names[other] for other in np.flatnonzero(rows.visible[row])} == seen | {name}, name
    wanted = {names[row] for row in np.flatnonzero(rows.needs_logits)}
    assert wanted == {"last", "g51", "g52", "g53", "g62", "g63"} | {f"2.{j}" for j in range(W)}


def test_harvest_and_slide() -> None:
    drafter = window()
    drafter.propose([1, LAST_TOKEN], limit=100)
    rows = len(drafter.window_rows())
    answers = [31, 32, 33, 34, 35]
    drafter.observe([1, LAST_TOKEN, 77], outcome([-1] * (rows - W) + answers, last_choice=77))
    # Column j: the key is level 0's token (the current one for j = 0), the value levels 1, 2 and the new answer.
    assert drafter.pool.after(LAST_TOKEN) == [(10, 20, 31)]
    for j in range(1, W):
        assert drafter.pool.after(j) == [(10 + j, 20 + j, answers[j])]
    # Level 0 is level 1 without its head, level 1 is level 2, the last level is what came back.
    assert drafter.levels == [[11, 12, 13, 14], [20, 21, 22, 23, 24], answers]


@pytest.mark.parametrize(("ngram", "width"), [(2, 1), (2, 4), (3, 1), (4, 5), (5, 15), (7, 2)])
def test_warm_up_takes_n_minus_2_steps(ngram: int, width: int) -> None:
    config = Lookahead(window=width, ngram=ngram, guesses=3, from_prompt=False)
    drafter = LookaheadDrafter(config, [3, 4, 5])
    assert len(drafter.levels[0]) == width + ngram - 3
    ids = [3, 4, 5]
    for step in range(ngram - 2):
        assert len(drafter.levels) == step + 1
        assert not any(drafter.pool.after(token) for token in range(1000))
        window = drafter.propose(ids, limit=9).window
        assert len(window) <= config.max_rows
        columns = width + ngram - 2 - step
        assert window.offsets.max(initial=0) <= columns - 1 + step
        before = [list(level) for level in drafter.levels]
        answers = [200 + 10 * step + c for c in range(columns)]
        top = columns - (step == 0)  # at level 0 the first prediction is the last token's own
        ids.append(answers[0])
        drafter.observe(ids, outcome([-1] * (len(window) - top) + answers[columns - top :], last_choice=answers[0]))
        assert drafter.levels == [level[1:] for level in [*before, answers]]
    assert [len(level) for level in drafter.levels] == [width - 1] + [width] * (ngram - 2)
    window = drafter.propose(ids, limit=9).window
    drafter.observe([*ids, 9], outcome(list(range(300, 300 + len(window))), last_choice=9))
    assert len(drafter.pool.after(ids[-1])) == 1


def test_level_0_starts_with_tokens_of_the_prompt_and_one_prompt_always_starts_alike() -> None:
    config = Lookahead(window=9, ngram=5)
    one, two = (LookaheadDrafter(config, [5, 6, 7, 8]) for _ in range(2))
    assert one.levels == two.levels
    assert set(one.levels[0]) <= {5, 6, 7, 8}


def test_the_pool_keeps_the_most_recent_and_forgets_the_least() -> None:
    pool = NgramPool(ngram=3, guesses=2)
    for value in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.add(7, value)
    assert pool.after(7) == [(3, 3), (1, 1)]
    assert pool.after(8) == []
    nothing = NgramPool(ngram=3, guesses=0)
    nothing.add(7, (1, 1))
    assert nothing.after(7) == []


def test_prompt_n_grams_and_those_of_the_growing_text() -> None:
    drafter = LookaheadDrafter(Lookahead(window=1, ngram=3, guesses=4), [1, 2, 3, 1, 2, 4])
    assert drafter.pool.after(1) == [(2, 4), (2, 3)]
    assert drafter.pool.after(3) == [(1, 2)]
    assert drafter.pool.after(2) == [(3, 1)]
    ids = [1, 2, 3, 1, 2, 4, 8, 9]
    window = drafter.propose(ids[:-2], limit=5).window
    drafter.observe(ids, outcome([0] * len(window), last_choice=8, emitted=[8, 9]))
    assert drafter.pool.after(2)[0] == (4, 8)
    assert drafter.pool.after(4)[0] == (8, 9)


def test_drafts_are_cut_to_the_tokens_that_can_still_be_emitted() -> None:
    drafter = LookaheadDrafter(Lookahead(window=2, ngram=5), [1, 2, 3, 4, 5, 1])
    assert drafter.propose([1, 2, 3, 4, 5, 1], limit=2).drafts.tolist() == [[2, 3]]


@pytest.mark.parametrize("config", [Lookahead(w, n, 3) for w in (1, 2, 5, 15) for n in (2, 3, 5, 9)])
def test_no_step_has_more_rows_than_promised(config: Lookahead) -> None:
    drafter = LookaheadDrafter(config, [1, 2, 3])
    widest, ids = 0, [1, 2, 3]
    for _ in range(config.ngram + 2):
        window = drafter.propose(ids, limit=99).window
        widest = max(widest, len(window))
        ids.append(4)
        drafter.observe(ids, outcome([5] * len(window), last_choice=4))
    assert widest == config.max_rows - config.guesses * (config.ngram - 1)
