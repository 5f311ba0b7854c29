"""/metrics: what the server counted itself, and what the engine reports, as Prometheus text.

The server's own figures live in a registry of their own. The engine's figures are read at each scrape: its counters already
only grow. Whatever fails here is logged and left out of the page; no answer to a client ever waits for it or fails by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from kvalet.api.engine_metrics import engine_families
from kvalet.api.exchange import Exchange
from kvalet.api.ports import TurnEnginePort
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LOGGER = logging.getLogger("kvalet.metrics")
PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"},
)
OTHER = "other"
"""Label of every other path: labels must be bounded, and paths come from clients."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class EngineCollector(Collector):
    """The engine's statistics at the moment of the scrape. A counter that would fall (a defect elsewhere) stays where it was:
    whoever reads it takes a fall for a restart. As many values are remembered as there are series."""

    def __init__(self, engine: TurnEnginePort) -> None:
        self._engine = engine
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def collect(self) -> Iterable[Metric]:
        # A defect in a figure must not take the whole page, which others need to see that something is wrong.
        try:
            return [self._held(family) for family in engine_families(self._engine.statistics(), self._engine.model)]
        except Exception:
            LOGGER.exception("the engine's figures are missing from this scrape")
            return []

    def _held(self, family: Metric) -> Metric:
        if family.type == "counter":
            for index, sample in enumerate(family.samples):
                key = (sample.name, tuple(sample.labels.values()))
                self._highest[key] = max(sample.value, self._highest.get(key, 0.0))
                family.samples[index] = sample._replace(value=self._highest[key])
        return family


class ServerMetrics:
    """One registry per server, so that two servers in one process do not share figures."""

    def __init__(self, engine: TurnEnginePort) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "kvalet_http_requests", "Requests by path and status (499: the client left)", ["path", "method", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "kvalet_http_request_seconds", "From the head of the request to the end of the answer", ["path"],
            buckets=SECONDS, registry=self._registry,
        )  # fmt: skip
        self._registry.register(EngineCollector(engine))

    def observe(self, exchange: Exchange) -> None:
        """Count one finished request."""
        path = exchange.path if exchange.path in PATHS else OTHER
        method = exchange.method if exchange.method in ("GET", "POST") else OTHER
        self._requests.labels(path, method, str(exchange.outcome)).inc()
        self._seconds.labels(path).observe(max(0.0, time.perf_counter() - exchange.started))

    def render(self) -> tuple[str, bytes]:
        """(content type, text)."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)
