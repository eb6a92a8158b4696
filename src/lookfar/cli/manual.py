"""The commands as a page: `python -m lookfar.cli.manual > docs/cli.md`. A test says when the page is out of date."""

from __future__ import annotations

import re

import typer
from typer.cli import get_docs_for_click

from lookfar.cli import app


def manual() -> str:
    """Every command with its options, as Markdown."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    text = get_docs_for_click(obj=command, ctx=context, name="lookfar", title="The command line")
    text = re.sub(r"\[default: ([^]]*)\]", r"(default: \1)", text)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


if __name__ == "__main__":
    print(manual(), end="")
