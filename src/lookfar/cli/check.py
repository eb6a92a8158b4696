"""`lookfar check`: how lookfar decodes a model, and why, from its config alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lookfar.cli import options

MODES = {"tree": "draft trees", "chain": "draft chains", "none": "none: decoded by transformers"}
Model = Annotated[str, typer.Argument(help="demo, a directory, a config.json or a hub name.")]


def check(model: Model, as_json: options.Json = False) -> None:
    """Say how lookfar decodes MODEL, and why. Reads its config only."""
    from lookfar.models.pretrained import read_config
    from lookfar.models.support import examine

    support = examine(read_config(model)[0])
    if as_json:
        print(json.dumps(asdict(support) | {"trees": support.trees}))
        return
    out, facts = Console(highlight=False), Table(show_header=False, box=None)
    facts.add_row("model type", support.model_type)
    facts.add_row("speculation", MODES[support.mode])
    if support.reason:
        facts.add_row("why no trees" if support.drafts else "why", support.reason)
    if support.recurrent:
        facts.add_row("after a wrong draft", "the recurrent state is put back, and accepted tokens are fed again")
    if support.encoder_decoder:
        facts.add_row("source", "encoded once; drafts also come from it where the vocabulary is the same")
    elif support.takes_media:
        facts.add_row("images, audio, video", "transformers runs such prompts, and decoding goes on from its KV")
    for layer_type, kind in support.kinds.items() if support.drafts else ():
        facts.add_row("layers" if len(support.kinds) == 1 else layer_type.replace("_", " "), str(kind))
    facts.add_row("positions", "ALiBi bias" if support.alibi else "given with each row")
    facts.add_row("longest text", f"{support.max_positions} tokens" if support.max_positions else "no limit")
    if support.drafts and support.tree_limit is not None:
        facts.add_row("drafts up to", f"{support.tree_limit} tokens; transformers decodes longer requests")
    if support.drafts and support.one_by_one:
        facts.add_row("batches", "each request in a forward pass of its own")
    out.print(facts)
