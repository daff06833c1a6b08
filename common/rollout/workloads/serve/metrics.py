"""Prometheus metrics of the gateway."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The metrics. `key` is the name of an API key, or `-` if none is required."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of: Any = {"registry": self.registry}
        self.requests = Counter(
            "rollout_serve_requests", "Requests that ended, by HTTP status.", ["endpoint", "key", "status"], **of
        )
        self.tokens = Counter("rollout_serve_tokens", "Tokens of prompts and answers.", ["key", "kind"], **of)
        self.left = Counter("rollout_serve_clients_left", "Requests whose client left before the end.", ["key"], **of)
        self.replays = Counter("rollout_serve_replays", "Requests that went on at another engine.", **of)
        self.switches = Counter("rollout_serve_switches", "Switches to another model.", **of)
        self.in_flight = Gauge("rollout_serve_in_flight", "Requests that are being answered, or wait.", **of)
        self.queued = Gauge("rollout_serve_queued", "Requests that wait for an engine.", **of)
        self.engines = Gauge("rollout_serve_engines", "Engines that take requests.", **of)
        self.first_token = Histogram(
            "rollout_serve_first_token_seconds", "From the request to the first of its answer.", buckets=_SECONDS, **of
        )
        self.seconds = Histogram(
            "rollout_serve_request_seconds", "From the request to the end of its answer.", buckets=_SECONDS, **of
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
