"""The command line: one small file per command."""

from __future__ import annotations

import os
import sys
import warnings

import typer
from rich.console import Console

from lookfar.cli.bench import app as bench
from lookfar.cli.chat import chat
from lookfar.cli.check import check
from lookfar.cli.compare import compare
from lookfar.cli.doctor import doctor
from lookfar.cli.explain import explain
from lookfar.cli.generate import generate
from lookfar.cli.options import say
from lookfar.cli.serve import serve
from lookfar.cli.store import app as store
from lookfar.cli.top import top
from lookfar.cli.tune import tune
from lookfar.core.progress import say_as_lines
from lookfar.errors import ConfigError, LookfarError, LookfarWarning, RankError
from lookfar.ranks import own_rank, world_size
from lookfar.version import __version__

ON_RANKS = ("generate", "chat", "compare", "explain", "serve", "doctor")  # commands that torchrun can start

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decode any Hugging Face causal language model in fewer steps, with the same tokens.",
)
app.command()(generate)
app.command()(chat)
app.command()(compare)
app.command()(check)
app.command()(explain)
app.command()(tune)
app.command()(serve)
app.command()(top)
app.command()(doctor)
app.add_typer(bench, name="bench")
app.add_typer(store, name="store")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lookfar {__version__}")
        raise typer.Exit


WELCOME = f"""[bold]lookfar {__version__}[/]: decode Hugging Face models in fewer steps, with the same tokens.

Three things to try, with a small demo model (a download of 93 MB, once):

  [bold cyan]lookfar compare[/] "Rewrite in the past tense: The fox walks. The fox sees a river. The fox drinks."
      the speed without speculation and with it, and whether the texts agree
  [bold cyan]lookfar chat[/]
      a conversation; tokens that were decoded in one step share a colour
  [bold cyan]lookfar explain[/] "Count from 1 to 30." --html steps.html
      a page that shows the draft tree of every step

Your own model: [bold]--model[/] with a directory or a hub name. [bold]lookfar --help[/] lists all commands,
[bold]lookfar doctor[/] shows what is accelerated on this machine."""


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    if context.invoked_subcommand is None:
        Console(highlight=False).print(WELCOME, soft_wrap=True)
    elif world_size() > 1 and context.invoked_subcommand not in ON_RANKS:
        raise ConfigError(
            f"lookfar {context.invoked_subcommand} runs in one process: start it without torchrun, or unset WORLD_SIZE."
        )


def main() -> None:
    """Run the command line; a mistake ends in one sentence and exit code 2."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", LookfarWarning)
    say_as_lines()
    warnings.showwarning = lambda message, *_: say("Note", str(message), "yellow")
    messages = sys.stderr
    try:
        if world_size() > 1 and own_rank() and not os.environ.get("LOOKFAR_DEBUG"):
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  rank 0 speaks for all
        app()
    except LookfarError as error:
        sys.stderr = messages if isinstance(error, RankError) else sys.stderr
        say("Error", str(error), "bold red")
        sys.exit(2)
    except Exception as error:
        if os.environ.get("LOOKFAR_DEBUG"):
            raise
        first_line = (str(error).splitlines() or [""])[0]
        say("Error", f"{type(error).__name__}: {first_line} (set LOOKFAR_DEBUG=1 for the traceback)", "bold red")
        sys.exit(1)
