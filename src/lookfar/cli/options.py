"""What the commands share: their options, and a voice beside the output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from lookfar.errors import ConfigError

if TYPE_CHECKING:
    from lookfar.config import Strategy
    from lookfar.lm import LM

Prompt = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
Model = Annotated[str, typer.Option(help="demo, a directory of a saved model, or a hub name.")]
StrategyName = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="auto (the default), none, suffix, recycle, trie, lookahead, jacobi, prompt_lookup, draft_model, "
        "or several joined by +.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A strategy's setting, e.g. window=7. Repeatable."),
]
Budget = Annotated[
    str | None,
    typer.Option(help="Rows a step: auto, or a number. By default auto for auto, all that is proposed for the rest."),
]
StoreFile = Annotated[Path | None, typer.Option("--store", help="A store of past texts to guess from.")]
Pack = Annotated[
    bool | None,
    typer.Option("--pack/--no-pack", help="Keep a packed copy of the weights. By default on a CPU, if there is room."),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="On a GPU: run the layers through torch.compile (a minute the first time).")
]
Exact = Annotated[
    bool, typer.Option("--exact", help="On a GPU: the same text to the last bit whatever is guessed, in bfloat16 too.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
MaxLength = Annotated[int | None, typer.Option(help="The longest text, prompt included, to keep room for.")]
Temperature = Annotated[float | None, typer.Option(help="Sample, with this temperature; 0 takes the best token.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that make up this probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many tokens; 0 from all.")]
MinP = Annotated[float | None, typer.Option(help="Sample from tokens at least this likely, compared with the best.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: lower the scores of tokens of the text.")]
Seed = Annotated[int | None, typer.Option(help="The same seed samples the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop at this text. Repeatable.")]
JsonSchema = Annotated[Path | None, typer.Option(help="A file with the JSON schema that the answer follows.")]
Regex = Annotated[str | None, typer.Option(help="A regular expression that the answer follows.")]
Raw = Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the model's chat template.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 … or auto to spread the model.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, float64 or auto.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def say(kind: str, sentence: str, style: str) -> None:
    """Say something beside the output, on standard error."""
    Console(stderr=True).print(f"[{style}]{kind}:[/] {escape(sentence)}", soft_wrap=True, highlight=False)


def strategies(name: str | None, settings: list[str] | None) -> tuple[Strategy, ...] | None:
    """The strategies that `--strategy` and `--set` describe; None if neither was given."""
    from lookfar.config import parse_strategy

    if name is None and not settings:
        return None
    pairs = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes key=value, not {setting!r}.")
        pairs[key.strip()] = value.strip()
    return parse_strategy(name or "auto", pairs)


def rows(text: str | None) -> int | Literal["auto"] | None:
    """What `--budget` says."""
    from lookfar.config import check_budget

    budget: Any = int(text) if text is not None and text.isdecimal() else text
    check_budget(budget)
    return budget  # type: ignore[no-any-return]


def sampling(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
) -> dict[str, Any]:
    """The generation arguments that the options for sampling ask for."""
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    given["repetition_penalty"] = repetition_penalty
    return {name: value for name, value in given.items() if value is not None}


def constraints(stop: list[str] | None, json_schema: Path | None, regex: str | None) -> dict[str, Any]:
    """The generation arguments that say where an answer ends and what it may be."""
    given: dict[str, Any] = {"stop_strings": stop or None, "regex": regex}
    if json_schema is not None:
        try:
            given["json_schema"] = json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{json_schema} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    return {name: value for name, value in given.items() if value is not None}


def load_model(
    name: str,
    device: str | None,
    dtype: str | None,
    max_length: int | None,
    store: Path | None = None,
    pack: bool | None = None,
    compile: bool = False,
    exact: bool = False,
) -> LM:
    """Load a model for a command."""
    from transformers import logging

    from lookfar.loading import load

    logging.set_verbosity_error()  # its advice would stand in the middle of an answer
    return load(
        name,
        device=device,
        dtype=dtype,
        max_batch=1,
        max_length=max_length,
        store=store,
        pack=pack,
        compile=compile,
        exact=exact,
    )


def prompt_ids(lm: LM, prompt: str, raw: bool) -> tuple[list[int], str]:
    """The ids of a prompt and its text: a user's message where the model has a chat template, plain otherwise."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not raw and text.strip() and getattr(lm.tokenizer, "chat_template", None):
        return lm.chat_ids([{"role": "user", "content": text}]), text
    return lm.encode(text), text


def names(text: str) -> list[str]:
    """What was given joined by commas."""
    return [part.strip() for part in text.split(",")]


def check_page(path: Path | None) -> None:
    """A page that cannot be written should not cost the work that it would show."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory: give --html a file in one that exists.")


def write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
