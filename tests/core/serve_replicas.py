"""Replicas as a gateway sees them: what a test says of them, and what they were asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.serve.exchange import Exchange, Limits
from rollout.workloads.serve.frames import Ask, FromReplica, Stop, encoded, frames_of, to_replica
from rollout.workloads.serve.routing import Replica, Router

A, B = (1, 0, 1), (1, 1, 1)
"""Two replicas."""


def config_of(**serve: Any) -> ServeConfig:
    serve = {"served_name": "m", "queue_s": 0.05, **serve}
    return ServeConfig.model_validate({"model": {"uri": "base"}, "backend": {"kind": "mock"}, "serve": serve})


@dataclass
class Replicas:
    """`answer(replica, ask)`: what it says at once; it may say more later (`say`)."""

    answer: Callable[[Replica, Ask], list[FromReplica]] = lambda replica, ask: []
    asked: list[tuple[Replica, Ask]] = field(default_factory=list[tuple[Replica, Ask]])
    stopped: list[tuple[Replica, int]] = field(default_factory=list[tuple[Replica, int]])
    reachable: bool = True
    exchange: Exchange = field(init=False)

    def exchange_of(self, config: ServeConfig, on_replay: Callable[[], None] = lambda: None) -> Exchange:
        serve = config.serve
        limits = Limits(serve.queue_s, serve.max_queued, serve.replay)
        router = Router(serve.max_in_flight)
        self.exchange = Exchange(self.send, router, limits, config.backend.kind, on_replay)
        return self.exchange

    def send(self, replica: Replica, frame: bytes) -> bool:
        for message in to_replica(frame):
            match message:
                case Ask():
                    self.asked.append((replica, message))
                    if self.reachable:
                        self.say(replica, *self.answer(replica, message))
                case Stop():
                    self.stopped.append((replica, message.id))
        return self.reachable

    def say(self, replica: Replica, *messages: FromReplica) -> None:
        for frame in frames_of(map(encoded, messages)):
            self.exchange.said(replica, frame)
