"""Counts of a service, as Prometheus metrics."""

from __future__ import annotations

import logging
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from lookfar.engine.outputs import RequestResult
from lookfar.engine.stats import DrafterStats

LATENCIES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 120, 300)
INTERVALS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
TOKENS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 32)

log = logging.getLogger("lookfar.server")


class Metrics:
    """What a service counts. `status` adds what the engine knows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made: Any = {"registry": self.registry}
        self._responses = Counter("lookfar_http_responses", "HTTP responses.", ["path", "status"], **made)
        self._ended = Counter("lookfar_requests", "Generation requests by how they ended.", ["outcome"], **made)
        self._queue = Histogram("lookfar_queue_seconds", "Waiting for a place.", buckets=LATENCIES, **made)
        self._first = Histogram(
            "lookfar_time_to_first_token_seconds", "From the request to its first token.", buckets=LATENCIES, **made
        )
        self._between = Histogram(
            "lookfar_inter_token_latency_seconds",
            "Time between two steps of a streamed answer, divided by the tokens that the later one brought.",
            buckets=INTERVALS,
            **made,
        )
        self._seconds = Histogram("lookfar_request_seconds", "Whole requests.", buckets=LATENCIES, **made)
        self._per_step = Histogram("lookfar_tokens_per_step", "Of finished answers.", buckets=TOKENS, **made)
        self.outcomes: dict[str, int] = {}
        self.drafters: dict[str, DrafterStats] = {}  # of finished answers
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP response; `path` is that of the route."""
        self._responses.labels(path, str(status)).inc()

    def admitted(self, seconds: float) -> None:
        """Count a request that got its place after `seconds`."""
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """Count tokens that came `seconds` after the ones before."""
        self._between.observe(seconds / tokens)

    def finished_answer(self, result: RequestResult) -> None:
        """Count an answer that came to its end."""
        stats = result.stats
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += stats.reused_tokens
        self._per_step.observe(stats.tokens_per_step)
        for name, counts in stats.drafters.items():
            total = self.drafters.setdefault(name, DrafterStats())
            total.proposed += counts.proposed
            total.accepted += counts.accepted

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a request that ended: completed, cancelled, failed or timeout."""
        self._ended.labels(outcome).inc()
        self._seconds.observe(seconds)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def log_failure(self, error: BaseException) -> None:
        """Log an error of the engine with its traceback, which clients do not see."""
        log.error("A request failed.", exc_info=error)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
