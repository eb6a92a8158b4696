"""The id, time and model that a response carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time
from typing import Any


@dataclass(frozen=True)
class Identity:
    """What all chunks of one response share."""

    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time()))

    def of(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the first fields of a response or a chunk of this kind."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
