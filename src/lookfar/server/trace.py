"""The steps of a streamed answer with their draft trees, for the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lookfar.explain import explain_step
from lookfar.lm import LM
from lookfar.server.choices import Delta
from lookfar.server.schemas import LookfarOptions


def traced(lm: LM, options: LookfarOptions | None, delta: Delta) -> dict[str, Any]:
    """Return the steps of a delta, if the request asks for them."""
    if options is None or not options.trace:
        return {}
    steps = [asdict(explain_step(lm, output)) | {"text": text} for output, text in delta.steps]
    for step in steps:
        for node in step["nodes"]:
            node["probability"] = round(node["probability"], 5)
    return {"lookfar": {"steps": steps}}
