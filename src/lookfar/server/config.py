"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from lookfar.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. A request beyond a limit is refused before anything is decoded."""

    body_bytes: int = 4 << 20
    prompts: int = 32  # in one request for completions
    n: int = 16  # answers to one prompt
    answers: int = 64  # of one request
    body_seconds: float = 30.0  # between two parts of a body
    stops: int = 16  # stop strings
    stop_length: int = 256  # characters of one
    logprobs: int = 20  # alternatives of one token
    logit_biases: int = 1024
    schema_bytes: int = 64 << 10  # of a JSON schema, a grammar or all tools
    regex_length: int = 1024
    budget: int = 128  # rows a step


@dataclass(frozen=True)
class ServerConfig:
    """The settings of a server, beside those of its LM."""

    model_name: str = "demo"
    max_queue: int = 256  # answers that may wait for a place; beyond that: 429
    request_timeout: float = 600.0  # seconds, waiting included
    prefix_bytes: int = 1 << 30  # of the KV of past texts, for prompts that begin like them; 0: none is kept
    stream_interval: float = 0.005  # seconds within which tokens are sent together; longer with many streams
    drain_seconds: float = 30.0  # for running requests when the server is stopped
    store: Path | None = None  # the draft store: read at the start, saved at intervals and at the end
    save_seconds: float = 60.0
    share: str | None = None  # the URL of a Redis or Valkey server through which replicas share their stores
    keys_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()  # values of the Host header; empty: any
    cors_origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("max_queue", "request_timeout", "drain_seconds", "save_seconds"):
            value = getattr(self, name)
            if not 0 < value < inf:
                raise ConfigError(f"{name} must be a number above 0, not {value}.")
        if not self.stream_interval >= 0:
            raise ConfigError(f"stream_interval must be 0 or more seconds, not {self.stream_interval}.")
