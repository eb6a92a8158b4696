"""The settings of the proposer, from `additional_config={"lookfar": {...}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lookfar.errors import ConfigError
from lookfar.speculation.chain_proposer import MIN_PROBABILITY


@dataclass(frozen=True)
class ProposerSettings:
    """What `additional_config["lookfar"]` may hold."""

    min_probability: float = MIN_PROBABILITY  # a chain ends where it is less likely than this to be accepted
    remember: bool = True  # whether answers are kept for drafting later ones
    store: str | None = None  # a file of past texts to draft from
    share: str | None = None  # the URL of a Redis or Valkey server through which engines share what they learn
    namespace: str = ""  # under which it is shared
    log_seconds: float = 60.0  # between two lines in the log; 0: none

    def __post_init__(self) -> None:
        for name, kind in (("min_probability", (int, float)), ("log_seconds", (int, float)), ("remember", (bool,))):
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
                raise ConfigError(f"lookfar: {name} must be {'true or false' if bool in kind else 'a number'}.")
        if not 0 < self.min_probability < 1:
            raise ConfigError(f"lookfar: min_probability must lie between 0 and 1, not {self.min_probability}.")

    @classmethod
    def of(cls, additional_config: Any) -> ProposerSettings:
        """Read the settings; vLLM hands over what the user gave as it is."""
        given = additional_config.get("lookfar", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f'additional_config["lookfar"] holds names and values, not {given!r}.')
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"lookfar has no setting {name!r}: use {', '.join(known)}.")
        return cls(**given)
