"""Which shared texts a store holds, so that no text is learned twice."""

from __future__ import annotations

import json
import secrets

MAX_ORIGINS = 4096  # stores that are remembered; beyond that the one heard from longest ago is forgotten


class Provenance:
    """The number of the last text from each origin.

    Every store that publishes texts is an origin and numbers them 1, 2, 3 …. They arrive in this order, so one number
    for each origin says which of them are known: after a lost reply, a server that was restarted, or in a store that
    was saved and loaded.
    """

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.renew()

    def renew(self) -> None:
        """Publish under a new name from now on."""
        self.origin = secrets.token_hex(8)

    def next_number(self) -> int:
        """Return the number of a text that this store publishes."""
        number = self.last.get(self.origin, 0) + 1
        self.last[self.origin] = number
        return number

    def accept(self, origin: str, number: int) -> bool:
        """Return whether a text is new, and count it as known from now on."""
        if number <= self.last.get(origin, 0):
            return False
        self.last.pop(origin, None)  # the latest origin moves to the end
        self.last[origin] = number
        if len(self.last) > MAX_ORIGINS:
            del self.last[next(name for name in self.last if name != self.origin)]
        return True

    def dumps(self) -> str:
        """Return a text for a file; empty if nothing was shared."""
        return json.dumps(self.last) if self.last else ""

    def loads(self, text: str) -> None:
        """Add what a file holds. Raises ValueError if it is not what `dumps` returns."""
        found = json.loads(text) if text else {}
        if not isinstance(found, dict) or not all(isinstance(number, int) for number in found.values()):
            raise ValueError("not the origins of a store")
        for origin, number in found.items():
            self.accept(origin, number)
