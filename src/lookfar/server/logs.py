"""Structured logs: one line for each event, as JSON or as `key=value`."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class StructuredFormatter(logging.Formatter):
    """Formats a record with the dictionary in its `fields`."""

    def __init__(self, kind: LogFormat) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if self._kind == "json":
            return json.dumps(line, ensure_ascii=False, default=str)
        trace = line.pop("traceback", "")
        words = [f"{key}={_word(value)}" for key, value in _flat(line).items() if key not in ("time", "level", "event")]
        text = " ".join([line["time"], line["level"], line["event"], *words])
        return f"{text}\n{trace}" if trace else text


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested fields with dotted names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _word(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=\n') else text


def set_up_logs(kind: LogFormat, level: str = "INFO") -> None:
    """Write the logs of the server and of uvicorn's errors to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(StructuredFormatter(kind))
    for name in ("lookfar.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
