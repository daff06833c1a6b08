"""The front of the server: who may send requests, which generation answers them, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from rollout.workloads.infer.bodies import CHAT, EMBED, TEXT
from rollout.workloads.json_form import JsonObject
from rollout.workloads.serve.asks import ask_of
from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.serve.errors import ApiError
from rollout.workloads.serve.exchange import Exchange
from rollout.workloads.serve.keys import Keys
from rollout.workloads.serve.metrics import Metrics

_PROBES: tuple[tuple[str, JsonObject], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}),
    (TEXT, {"prompt": "Hello", "max_tokens": 1}),
    (EMBED, {"input": "Hello"}),
)
"""Probes to try in order: some models have no chat template, and some engines only embed."""


@dataclass(slots=True)
class Generation:
    """The replicas of one model. `label` identifies the weights in the response header x-rollout-model. `waits_for`
    says, in words, why the generation is not ready."""

    label: str
    exchange: Exchange
    ready: bool = False
    waits_for: str = ""

    async def probe(self, config: ServeConfig) -> None:
        """Generate one token for real. Raises ApiError if that fails."""
        fault: ApiError | None = None
        for url, body in _PROBES:
            try:
                async with aclosing(self.exchange.converse(ask_of(url, body, config))) as pieces:
                    async for _ in pieces:
                        pass
            except ApiError as error:
                if error.status not in (400, 404, 422):
                    raise
                fault = fault or error
            else:
                self.ready = True
                return
        assert fault is not None
        raise fault


@dataclass(slots=True)
class Gateway:
    """Routes requests to the generation `current`; older ones finish theirs. `coming` takes over once it is ready."""

    config: ServeConfig
    keys: Keys
    metrics: Metrics = field(default_factory=Metrics)
    generations: list[Generation] = field(default_factory=list[Generation])
    coming: Generation | None = None
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False

    def __post_init__(self) -> None:
        self.idle.set()

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count a request as running inside the block."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    @property
    def current(self) -> Generation:
        """The generation that takes requests. Raises ApiError 503 if there is none yet or the server is stopping."""
        if self.draining:
            raise ApiError("the server is shutting down", status=503, retry_after_s=5)
        if not self.generations:
            raise ApiError("no engine is ready: the server is starting", status=503, retry_after_s=5)
        return self.generations[-1]

    @property
    def ready(self) -> bool:
        """Whether a request would be answered now."""
        if self.draining or not self.generations:
            return False
        return self.generations[-1].ready and bool(self.generations[-1].exchange.router.replicas)

    def switch(self, generation: Generation) -> None:
        """Send requests to `generation` from now on."""
        for older in self.generations:
            older.exchange.retire()
        if self.generations:
            self.metrics.switches.inc()
        self.generations.append(generation)

    def admit(self, keys: Keys) -> None:
        """Replace the API keys."""
        keys.succeed(self.keys)
        self.keys = keys

    def take(self, config: ServeConfig) -> None:
        """Apply other settings to requests that arrive from now on."""
        self.config = config
        for generation in self.generations:
            exchange = generation.exchange
            exchange.router.most = config.serve.max_in_flight
            exchange.limits.queue_s, exchange.limits.max_queued = config.serve.queue_s, config.serve.max_queued
            exchange.limits.replay = config.serve.replay

    def figures(self) -> None:
        """Update the gauges."""
        self.metrics.in_flight.set(self.in_flight)
        self.metrics.queued.set(sum(one.exchange.queued for one in self.generations))
        engines = self.generations[-1].exchange.router.engines if self.generations else {}
        self.metrics.engines.set(len(engines))
