"""The walk: from the root down the draft tree for as long as a child is what the model chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from lookfar.arrays import Floats, Int32s, Ints
from lookfar.choose import best, greedy, greedy_after
from lookfar.sequence import Sequence
from lookfar.tree import ROOT, Plan, TokenTree


@dataclass(frozen=True)
class Walk:
    """The accepted nodes of a sequence's tree, and the tokens they emit with the bonus token behind them."""

    nodes: list[int]
    tokens: list[int]


def walk(tree: TokenTree, choose: Callable[[int, list[int]], int]) -> Walk:
    """Walk a tree; `choose(node, tokens)` is the model's choice after a node that was reached over `tokens`."""
    node = ROOT
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(node, tokens)
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return Walk(nodes, tokens)
        nodes.append(child)
        node = child


@dataclass(frozen=True)
class Answers:
    """What the model said after the rows of a step, without processors."""

    choices: Ints  # [batch, rows] -1 where the logits were not wanted
    top_ids: Int32s | None = None  # [batch, kept rows, k] best first
    top_logits: Floats | None = None


def verify(
    plan: Plan, sequences: Seq[Sequence], logits: torch.Tensor, top: int = 0
) -> tuple[list[Walk | None], Answers]:
    """Walk every sequence of a step; one that fed a piece of its prompt has no walk.

    `top` predictions of every kept row come back too, if drafters want them.
    """
    if not len(plan.kept):
        return [None] * plan.batch, Answers(np.full(plan.tokens.shape, -1))
    answers = Answers(plan.by_row(greedy(logits)), *(best(logits, top) if top else ()))

    def walk_one(i: int) -> Walk | None:
        sequence, rows = sequences[i], plan.sequences[i]
        processors = sequence.request.processors
        if not rows.complete:
            return None
        if processors is None:
            chosen = answers.choices[i]
            return walk(rows.tree, lambda node, _: int(chosen[rows.node_row(node)]))

        def choose(node: int, tokens: list[int]) -> int:
            row = np.searchsorted(plan.kept, rows.node_row(node))
            return greedy_after(processors, sequence.ids + tokens, logits[i, row])

        return walk(rows.tree, choose)

    return [walk_one(i) for i in range(plan.batch)], answers
