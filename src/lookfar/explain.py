"""One decoding, step by step: what was guessed, by whom and how surely, what was accepted, what it cost."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from lookfar.config import name_of, parse_strategy
from lookfar.tree import ROOT

if TYPE_CHECKING:
    from lookfar.config import Budget, StrategySpec
    from lookfar.lm import LM
    from lookfar.sequence import Sequence
    from lookfar.tree import SequencePlan


@dataclass(frozen=True)
class Node:
    """One guess."""

    text: str
    parent: int  # its place among the step's nodes, -1 for the root
    source: str  # who spoke for it most
    backers: int  # how many sources offered it
    probability: float  # estimated, of being accepted, the whole path included
    accepted: bool


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    root: str  # the last token of the text before it
    emitted: list[str]
    nodes: list[Node]
    rows: int  # root, guesses and riders
    prompt_rows: int  # rows of the prompt that were read in the same pass
    riders: int
    seconds: float
    expected: float  # tokens that the estimates promised


@dataclass(frozen=True)
class Explanation:
    """A whole answer."""

    strategy: str
    steps: list[Step]

    @property
    def tokens(self) -> int:
        return sum(len(step.emitted) for step in self.steps)


def explain(
    lm: LM, ids: list[int], max_new_tokens: int, strategy: StrategySpec = None, budget: Budget = None
) -> Explanation:
    """Decode a prompt and keep every step."""
    steps: list[Step] = []

    def text_of(token: int) -> str:
        return str(lm.tokenizer.decode([token])) if lm.tokenizer is not None else str(token)

    def keep(sequence: Sequence, rows: SequencePlan, tokens: list[int], seconds: float) -> None:
        tree, accepted = rows.tree, set(_path(rows, tokens))
        nodes = [
            Node(
                text_of(int(tree.tokens[i])),
                int(tree.parents[i]),
                tree.source(i),
                int(tree.backers[i]),
                float(tree.scores[i]),
                i in accepted,
            )
            for i in range(len(tree))
        ]
        steps.append(
            Step(
                root=text_of(int(rows.chain[-1])),
                emitted=[text_of(token) for token in tokens],
                nodes=nodes,
                rows=len(rows) - rows.root_row,
                prompt_rows=rows.root_row,
                riders=sum(map(len, rows.riders)),
                seconds=seconds,
                expected=1 + sum(node.probability for node in nodes),
            )
        )

    lm.generate(ids, max_new_tokens=max_new_tokens, strategy=strategy, budget=budget, on_step=keep)
    return Explanation(name_of(lm.strategy if strategy is None else parse_strategy(strategy)), steps)


def _path(rows: SequencePlan, tokens: Seq[int]) -> list[int]:
    """The nodes that the emitted tokens went through."""
    path, node = [], ROOT
    for token in tokens:
        child = rows.tree.child(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return path


def as_page(explanation: Explanation, prompt: str, model: str) -> str:
    """A self-contained page. Texts are data for its script and never markup."""
    data = asdict(explanation) | {"prompt": prompt, "model": model}
    template = files("lookfar").joinpath("explain.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", json.dumps(data).replace("<", "\\u003c"))
