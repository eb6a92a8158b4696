"""HTML pages: self-contained, rendered from the Jinja templates here, with one base, one theme and one glossary."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lookfar.pages.glossary import GLOSSARY
from lookfar.version import __version__

_environment = Environment(
    loader=PackageLoader("lookfar.pages"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


_environment.globals |= {"glossary": GLOSSARY, "version": __version__}


def render(template: str, **values: Any) -> str:
    """Render a template; texts are escaped, and `Markup` is not."""
    return _environment.get_template(template).render(values)


def as_script_data(data: Any) -> Markup:
    """Return JSON for a `<script type="application/json">`: texts are data there and never markup."""
    return Markup(json.dumps(data).replace("<", "\\u003c"))


def theme() -> bytes:
    """Return the style sheet of the colours that all pages share."""
    return (files("lookfar.pages") / "templates" / "theme.css").read_bytes()
