"""The command line: one small file per command."""

from __future__ import annotations

import sys

import typer

from lookfar.cli.check import check
from lookfar.cli.compare import compare
from lookfar.cli.generate import generate
from lookfar.cli.options import fail
from lookfar.errors import LookfarError
from lookfar.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decode any Hugging Face causal language model in fewer steps, with the same tokens.",
)
app.command()(generate)
app.command()(compare)
app.command()(check)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lookfar {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line; a mistake ends in one sentence and exit code 2."""
    try:
        app()
    except LookfarError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
