"""`lookfar explain`: the draft tree of every step, its sources and probabilities, and what was accepted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from lookfar.cli import options

if TYPE_CHECKING:
    from lookfar.explain import Explanation, Step

Html = Annotated[Path | None, typer.Option(help="Write a page to look at instead.")]


def explain(
    prompt: options.Prompt,
    model: options.Model = "demo",
    strategy: options.StrategyName = None,
    settings: options.Settings = None,
    budget: options.Budget = None,
    store: options.StoreFile = None,
    pack: options.Pack = None,
    max_new_tokens: options.MaxNewTokens = 32,
    html: Html = None,
    raw: options.Raw = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Decode PROMPT and show the draft tree of every step, and what was accepted."""
    options.check_page(html)
    options.prepare()
    from lookfar.explain import explain as explain_steps, explain_page

    chosen, rows = options.strategies(strategy, settings), options.rows(budget)
    lm = options.load_model(model, options.ModelOptions(device, dtype, None, store, pack))
    ids, text = options.prompt_ids(lm, prompt, raw)
    options.speculate(lm, chosen, rows)
    lm.requests(ids, max_new_tokens=max_new_tokens)  # refuses a prompt that is too long before the warm-up
    lm.warmup(requests=1, length=len(ids) + max_new_tokens, prior=False)
    explained = explain_steps(lm, ids, max_new_tokens)
    if html is not None:
        options.write_page(html, explain_page(explained, text, model))
        options.say("Written", f"{html}, {len(explained.steps)} steps", "green")
    if as_json:
        print(json.dumps(asdict(explained), ensure_ascii=False))
    elif html is None:
        _show(explained)


def _show(explained: Explanation) -> None:
    out = Console(highlight=False)
    for number, step in enumerate(explained.steps, start=1):
        out.print(_tree(number, step))
    steps = max(len(explained.steps), 1)
    out.print(
        f"{explained.tokens} tokens in {len(explained.steps)} steps: {explained.tokens / steps:.2f} tokens per step"
    )


def _tree(number: int, step: Step) -> Tree:
    head = Text.assemble(
        (f"step {number}: ", "bold"),
        (" ".join(map(visible, step.emitted)), "green"),
        (
            f"  {len(step.emitted)} of {step.expected:.2f} tokens expected, {step.rows} rows, "
            + (f"{step.prompt_rows} more of the prompt, " if step.prompt_rows else "")
            + f"{1000 * step.seconds:.1f} ms",
            "dim",
        ),
    )
    drawn = Tree(head, guide_style="dim")
    branches: dict[int, Tree] = {-1: drawn}
    for place, node in enumerate(step.nodes):
        label = Text.assemble(
            (visible(node.text), "bold green" if node.accepted else ""),
            (f"  {node.probability:.0%} {node.source}", "dim"),
            (f" +{node.num_sources - 1}" if node.num_sources > 1 else "", "dim"),
        )
        branches[place] = branches[node.parent].add(label)
    return drawn


def visible(text: str) -> str:
    """Return a token's text with its white space shown."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "∅"
