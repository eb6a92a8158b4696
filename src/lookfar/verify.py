"""The walk: from the root down the draft tree for as long as a child is what the model chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from lookfar.choose import greedy, greedy_after
from lookfar.sequence import Sequence
from lookfar.tree import ROOT, Ints, Plan, TokenTree


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


def verify(plan: Plan, sequences: Seq[Sequence], logits: torch.Tensor) -> tuple[list[Walk | None], Ints]:
    """Walk every sequence of a step; one that fed a piece of its prompt has no walk.

    Also returns every row's choice without processors, [batch, rows], for rows whose logits were wanted.
    """
    if not len(plan.kept):
        return [None] * plan.batch, np.full(plan.tokens.shape, -1)
    choices = plan.by_row(greedy(logits))
    kept_index = {int(row): i for i, row in enumerate(plan.kept)}

    def walk_one(i: int) -> Walk | None:
        sequence, rows = sequences[i], plan.sequences[i]
        processors = sequence.request.processors
        if not rows.complete:
            return None
        if processors is None:
            return walk(rows.tree, lambda node, _: int(choices[i, rows.node_row(node)]))

        def choose(node: int, tokens: list[int]) -> int:
            return greedy_after(processors, sequence.ids + tokens, logits[i, kept_index[rows.node_row(node)]])

        return walk(rows.tree, choose)

    return [walk_one(i) for i in range(plan.batch)], choices
