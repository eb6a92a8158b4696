"""HTML pages: self-contained, rendered from the Jinja templates in this package."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_environment = Environment(
    loader=PackageLoader("lookfar.pages"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **values: Any) -> str:
    """Render a template; texts are escaped, and `Markup` is not."""
    return _environment.get_template(template).render(values)


def as_script_data(data: Any) -> Markup:
    """Return JSON for a `<script type="application/json">`: texts are data there and never markup."""
    return Markup(json.dumps(data).replace("<", "\\u003c"))
