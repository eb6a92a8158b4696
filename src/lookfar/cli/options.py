"""Options of the commands, and messages on standard error."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from lookfar.core import compile_ahead
from lookfar.core.progress import progress_bar
from lookfar.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from lookfar.drafters.base import Strategy
    from lookfar.lm import LM
    from lookfar.speculation.row_budget import Budget as RowBudget

Prompt = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
Model = Annotated[str, typer.Option(help="demo, a directory of a saved model, or a hub name.")]
StrategyName = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="auto (the default), none, suffix, recycle, trie, lookahead, jacobi, prompt_lookup, draft_model, mtp, "
        "the name of a registered strategy, or several joined by +.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A strategy's setting, e.g. window=7. Repeatable."),
]
Budget = Annotated[
    str | None,
    typer.Option(help="Rows per step: auto, or a number. Default: auto for auto, otherwise everything proposed."),
]
StoreFile = Annotated[Path | None, typer.Option("--store", help="A store of past texts to draft from.")]
Share = Annotated[
    str | None,
    typer.Option(
        envvar="LOOKFAR_SHARE",
        metavar="URL",
        help="Share the draft store with other replicas through a Redis or Valkey server: redis://host, or rediss:// "
        "for TLS. A password is safer in the environment variable.",
    ),
]
Pack = Annotated[
    bool | None,
    typer.Option("--pack/--no-pack", help="Keep a packed copy of the weights. By default on a CPU, if memory allows."),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="On a GPU: run the layers through torch.compile (20 seconds the first time).")
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="On a GPU in half precision: text that does not depend on drafts and batches, bit for bit. "
        "By default where the model allows it.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
MaxLength = Annotated[int | None, typer.Option(help="The most tokens of a text, prompt included.")]
Temperature = Annotated[float | None, typer.Option(help="Sample with this temperature; 0: take the most likely token.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most likely tokens that make up this probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many tokens; 0: from all.")]
MinP = Annotated[
    float | None, typer.Option(help="Sample from tokens at least this likely, relative to the most likely one.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: lower the scores of tokens that are already in the text.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed samples the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop at this text. Repeatable.")]
JsonSchema = Annotated[Path | None, typer.Option(help="A file with a JSON schema for the answer.")]
Regex = Annotated[str | None, typer.Option(help="A regular expression for the answer.")]
Raw = Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the model's chat template.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 … or auto to spread the model.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, float64 or auto.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def say(kind: str, sentence: str, style: str) -> None:
    """Print a message to standard error."""
    Console(stderr=True).print(f"[{style}]{kind}:[/] {escape(sentence)}", soft_wrap=True, highlight=False)


def prepare() -> None:
    """Import torch and transformers, which takes seconds, and compile the host's code meanwhile where that is left."""
    compile_ahead.start()
    with progress_bar("Importing torch and transformers"):
        import lookfar.loading  # noqa: F401


def strategies(name: str | None, settings: list[str] | None) -> tuple[Strategy, ...] | None:
    """Return the strategies that `--strategy` and `--set` describe; None if neither was given."""
    from lookfar.drafters.registry import parse_strategy

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
    """Return the value of `--budget`."""
    from lookfar.speculation.row_budget import check_budget

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
    """Return the generation arguments of the sampling options."""
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    given["repetition_penalty"] = repetition_penalty
    return {name: value for name, value in given.items() if value is not None}


def constraints(stop: list[str] | None, json_schema: Path | None, regex: str | None) -> dict[str, Any]:
    """Return the generation arguments for stop texts and constraints."""
    given: dict[str, Any] = {"stop_strings": stop or None, "regex": regex}
    if json_schema is not None:
        try:
            given["json_schema"] = json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"{json_schema} cannot be read ({reason}): give --json-schema a file.") from error
    return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class ModelOptions:
    """The options that say which model to load, and how."""

    device: str | None = None
    dtype: str | None = None
    max_length: int | None = None
    store: Path | None = None
    pack: bool | None = None
    compile: bool = False
    exact: bool | None = None
    share: str | None = None


def load_model(name: str, options: ModelOptions) -> LM:
    """Load a model for a command that decodes one prompt at a time."""
    return load(name, max_batch=1, **vars(options))


def load(name: str, **how: Any) -> LM:
    """Load a model on all ranks that torchrun has started, and wait until the host's code is compiled.

    Only rank 0 returns.
    """
    from transformers import logging

    from lookfar import parallel

    logging.set_verbosity_error()  # its advice would appear in the middle of an answer
    lm = parallel.load(name, **how)
    compile_ahead.wait()
    return lm


def speculate(lm: LM, strategies: tuple[Strategy, ...] | None, budget: RowBudget) -> None:
    """Use what was asked for; otherwise what `load` has chosen stays."""
    if strategies is not None:
        lm.strategy, lm.budget = strategies, budget
    elif budget is not None:
        lm.budget = budget


def prompt_ids(lm: LM, prompt: str, raw: bool) -> tuple[list[int], str]:
    """Return the ids of a prompt and its text; it is a user's message if the model has a chat template."""
    text = _standard_input() if prompt == "-" else prompt
    if not raw and text.strip() and getattr(lm.tokenizer, "chat_template", None):
        return lm.chat_ids([{"role": "user", "content": text}]), text
    return lm.encode(text), text


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except (AttributeError, OSError, ValueError):  # closed, or not UTF-8
        raise RequestError("The prompt cannot be read from standard input: pipe a text in UTF-8 into it.") from None


def names(text: str) -> list[str]:
    """Split a list joined by commas."""
    return [part.strip() for part in text.split(",")]


def check_writable(path: Path | None, option: str) -> None:
    """Refuse a file that cannot be written before the work that it would hold."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give {option} a file.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path.parent} is not a directory: give {option} a file in one that exists.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: give {option} a file in a directory of yours.")


def check_page(path: Path | None) -> None:
    check_writable(path, "--html")


def write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
