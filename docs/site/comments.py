"""A Griffe extension: the comment beside a field of a class is its documentation in the API reference."""

from __future__ import annotations

import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

import griffe


@cache
def comments(path: Path) -> dict[int, tuple[str, bool]]:
    """Return the comments of a file by line, and whether a comment has the line to itself."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#: ").partition("# type:")[0].strip()
            if not text.startswith(("type:", "noqa")):
                found[token.start[0]] = text, not token.line[: token.start[1]].strip()
    return found


class CommentDocs(griffe.Extension):
    """Take the comment at the end of a field's line, or on the lines above it, as its docstring."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        known, above = comments(attr.filepath), []
        for line in range(attr.lineno, (attr.endlineno or attr.lineno) + 1):
            if line in known and not known[line][1]:
                attr.docstring = griffe.Docstring(_sentence(known[line][0]), parent=attr)
                return
        line = attr.lineno - 1
        while line in known and known[line][1]:
            above.insert(0, known[line][0])
            line -= 1
        if above:
            attr.docstring = griffe.Docstring(_sentence(" ".join(above)), parent=attr)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ";")) else ".")
