"""The walk: from the root down the draft tree for as long as a child is what the model chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from lookfar.answers import Answers
from lookfar.arrays import Ints
from lookfar.choose import check_drawn, pick_all
from lookfar.sequence import FinishReason, Sequence
from lookfar.tree import ROOT, Plan, SequencePlan, TokenTree


@dataclass(frozen=True)
class Walk:
    """The accepted nodes of a sequence's tree, and the tokens they emit with the bonus token behind them."""

    nodes: list[int]
    tokens: list[int]
    finish_reason: FinishReason | None = None


def walk(
    tree: TokenTree,
    choose: Callable[[int, list[int]], int],
    ends: Callable[[list[int]], FinishReason | None] = lambda _: None,
) -> Walk:
    """Walk a tree; `choose(node, tokens)` is the model's choice after a node that was reached over `tokens`.

    Nothing is chosen after a token with which the text `ends`.
    """
    node = ROOT
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(node, tokens)
        tokens.append(token)
        finish_reason = ends(tokens)
        child = tree.child(node, token) if finish_reason is None else None
        if child is None:
            return Walk(nodes, tokens, finish_reason)
        nodes.append(child)
        node = child


def verify(plan: Plan, sequences: Seq[Sequence], answers: Answers) -> list[Walk | None]:
    """Walk every sequence of a step; one that fed a piece of its prompt has no walk."""

    def walk_one(i: int) -> Walk | None:
        sequence, rows = sequences[i], plan.sequences[i]
        if not rows.complete:
            return None
        chosen = answers.choices[i]
        if not sequence.plain:
            drawn = _draw_all(i, sequence, rows, answers)
            if drawn is None:
                return walk(rows.tree, choose_after(i), sequence.ends)
            chosen[rows.root_row : rows.node_row(len(rows.tree))] = drawn
        return walk(rows.tree, lambda node, _: int(chosen[rows.node_row(node)]), sequence.ends)

    def choose_after(i: int) -> Callable[[int, list[int]], int]:
        """One place after the other, each with its own text: only those that are reached cost anything."""
        sequence, rows = sequences[i], plan.sequences[i]

        def choose(node: int, tokens: list[int]) -> int:
            row = rows.node_row(node)
            token = sequence.choose(tokens, answers.logits(i, np.array([row]))[0])
            answers.choices[i][row] = token
            return token

        return choose

    return [walk_one(i) for i in range(plan.batch)]


def _draw_all(place: int, sequence: Sequence, rows: SequencePlan, answers: Answers) -> Ints | None:
    """The tokens drawn after a sequence's root and nodes; None if they have to be drawn one after the other.

    On an accelerator one call for all rows is faster than several that each wait for the device; on a CPU it is the
    other way round, since most rows are never reached and sorting a vocabulary takes milliseconds.
    """
    draws = sequence.request.draws
    if draws is None or not sequence.drawn_at_once or draws.noise.device.type == "cpu":
        return None
    first, last = rows.root_row, rows.node_row(len(rows.tree))
    if answers.drawn:
        drawn = answers.drawn[place][first:last]
        check_drawn(drawn)
        return drawn
    logits = answers.logits(place, np.arange(first, last))
    return pick_all(sequence.request.processors, draws, sequence.places(rows), logits)
