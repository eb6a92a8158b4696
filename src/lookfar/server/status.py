"""The state of a service: snapshots, a short history for the page and `lookfar top`, and gauges for Prometheus."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from time import time
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lookfar.server.service import Service
from lookfar.version import __version__

HISTORY = 300  # snapshots
HISTORY_SECONDS = 1.0  # between two of them
GAUGES = {
    "running": "Answers that are decoded.",
    "waiting": "Answers that wait for a place.",
    "paused": "Answers whose readers are slow.",
    "max_batch": "The most answers that are decoded at once.",
    "kv_bytes": "Memory of the KV cache.",
    "prefix_bytes": "Memory of the prefix cache.",
    "store_tokens": "Tokens in the draft stores.",
}
COUNTERS = {
    "steps": "Forward passes.",
    "rows": "Rows of those: prompts, last tokens and draft tokens.",
    "tokens": "Emitted tokens.",
    "decoded": "Requests that emitted tokens, added up over the steps.",
    "prompt_tokens": "Prompt tokens of finished answers.",
    "cached_tokens": "Of those: found in the KV cache.",
}


class Status:
    """Reads the present state of a service, and remembers the last minutes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        service.metrics.registry.register(self)

    def snapshot(self) -> dict[str, Any]:
        service, metrics = self._service, self._service.metrics
        engine, scheduler = service.lm.engine, service.lm.engine.scheduler
        counts = engine.counts
        controllers = sorted(dict(engine.speculator.controllers).items())
        return {
            "time": time(),
            "running": len(scheduler.running),
            "waiting": service.admission.waiting + len(scheduler.waiting),
            "paused": len(scheduler.paused),
            "open": len(service.open),
            "max_batch": scheduler.max_batch,
            "steps": counts.steps,
            "rows": counts.rows,
            "tokens": counts.tokens,
            "decoded": counts.decoded,
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "kv_bytes": engine.cache.nbytes,
            "prefix_bytes": scheduler.reuse.prefixes.nbytes if scheduler.reuse.prefixes is not None else 0,
            "store_tokens": sum(service.namespaces.tokens.values()),
            "speculating": {str(requests): one.speculating for requests, one in controllers},
            "outcomes": dict(metrics.outcomes),
            "drafters": {name: [one.proposed, one.accepted] for name, one in metrics.drafters.items()},
            "share": self._share(),
        }

    def _share(self) -> dict[str, Any] | None:
        """Return the counts of the shared store and whether its server answers; None without one."""
        share = self._service.share
        return None if share is None else {"up": not share.error, **asdict(share.counts)}

    async def keep_history(self) -> None:
        """Take a snapshot every second."""
        while True:
            self.history.append(self.snapshot())
            await asyncio.sleep(HISTORY_SECONDS)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics that the engine and the queue know at the time of a scrape."""
        now = self.snapshot()
        info = GaugeMetricFamily("lookfar_info", "The server.", labels=["version", "model"])
        info.add_metric([__version__, self._service.config.model_name], 1)
        yield info
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"lookfar_{name}", text, now[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"lookfar_{name}", text, now[name])
        drafts = CounterMetricFamily(
            "lookfar_draft_tokens", "Draft tokens of finished answers, by top source.", labels=["drafter", "state"]
        )
        for name, (proposed, accepted) in now["drafters"].items():
            drafts.add_metric([name, "proposed"], proposed)
            drafts.add_metric([name, "accepted"], accepted)
        yield drafts
        modes = GaugeMetricFamily(
            "lookfar_speculating", "Whether steps with so many requests speculate.", labels=["requests"]
        )
        for requests, mode in now["speculating"].items():
            modes.add_metric([requests], float(mode))
        yield modes
        if now["share"] is not None:
            yield from share_metrics(**now["share"])


def share_metrics(up: bool, **counts: int) -> Iterator[Metric]:
    """Return the metrics of a shared store."""
    yield GaugeMetricFamily("lookfar_share_up", "Whether the server of the shared store answers.", float(up))
    texts = CounterMetricFamily(
        "lookfar_shared_texts", "Texts of the shared store, by what was done.", labels=["state"]
    )
    for state, count in counts.items():
        texts.add_metric([state], count)
    yield texts
