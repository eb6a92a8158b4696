"""One decoding, step by step: the draft trees, the accepted paths, and the costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lookfar.drafters.registry import StrategySpec, name_of, parse_strategy
from lookfar.engine.outputs import StepOutput
from lookfar.lm import LM
from lookfar.pages import as_script_data, render
from lookfar.pages.glossary import GLOSSARY
from lookfar.speculation.row_budget import Budget


@dataclass(frozen=True)
class Node:
    """One draft token."""

    text: str
    parent: int  # its index among the step's nodes, -1 for a first token
    source: str  # its top source
    num_sources: int  # how many sources proposed it
    probability: float  # estimated, of being accepted, the whole path included
    accepted: bool


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    last_token: str  # of the text before it
    emitted: list[str]
    nodes: list[Node]
    rows: int  # last token, draft tree and window
    prompt_rows: int  # prefilled in the same pass
    window_rows: int
    seconds: float
    expected: float  # tokens, by the estimates


@dataclass(frozen=True)
class Explanation:
    """A whole answer."""

    strategy: str
    steps: list[Step]

    @property
    def tokens(self) -> int:
        return sum(len(step.emitted) for step in self.steps)

    @property
    def most_telling(self) -> int:
        """The step to look at first: the most tokens emitted, and then the most draft tokens beside them."""
        places = range(len(self.steps))
        return max(places, key=lambda i: (len(self.steps[i].emitted), len(self.steps[i].nodes)), default=0)


def explain(
    lm: LM, ids: list[int], max_new_tokens: int, strategy: StrategySpec = None, budget: Budget = None
) -> Explanation:
    """Decode a prompt and record every step."""
    steps: list[Step] = []
    lm.generate(
        ids,
        max_new_tokens=max_new_tokens,
        strategy=strategy,
        budget=budget,
        on_step=lambda output: steps.append(explain_step(lm, output)),
    )
    return Explanation(name_of(lm.strategy if strategy is None else parse_strategy(strategy)), steps)


def explain_step(lm: LM, output: StepOutput) -> Step:
    """Return one step with its draft tree, in texts."""

    def text_of(token: int) -> str:
        return str(lm.tokenizer.decode([token])) if lm.tokenizer is not None else str(token)

    emitted = [text_of(token) for token in output.tokens]
    fed = output.fed
    if fed is None:  # decoded by transformers
        return Step("", emitted, [], output.num_rows, 0, 0, output.seconds, 1.0)
    tree, accepted = fed.tree, set(fed.tree.path_of(output.tokens))
    nodes = [
        Node(
            text_of(int(tree.tokens[i])),
            int(tree.parents[i]),
            tree.source(i),
            int(tree.num_sources[i]),
            float(tree.scores[i]),
            i in accepted,
        )
        for i in range(len(tree))
    ]
    return Step(
        last_token=text_of(int(fed.pending[-1])),
        emitted=emitted,
        nodes=nodes,
        rows=output.num_rows,
        prompt_rows=fed.last_row,
        window_rows=sum(map(len, fed.windows)),
        seconds=output.seconds,
        expected=1 + sum(node.probability for node in nodes),
    )


def explain_page(explanation: Explanation, prompt: str, model: str) -> str:
    """Return a self-contained page."""
    data = asdict(explanation) | {"prompt": prompt, "model": model, "opens_on": explanation.most_telling}
    return render("explain.html", data=as_script_data(data), glossary_data=as_script_data(GLOSSARY))
