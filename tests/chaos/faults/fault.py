"""What every fault is: it aims until work is in flight, strikes, holds, heals, and says what proves it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from chaos.clients import Client
from chaos.ledger_reader import in_flight
from chaos.watcher import Watcher
from chaos.world import Daemon, World

MIN_OF_ONE, MIN_OF_ALL = 8, 24
"""Attempts that must be in flight at one worker, or in all, for a fault to count."""
Place = tuple[int, int]


@dataclass
class Scene:
    """What a fault acts on."""

    world: World
    watcher: Watcher
    clients: list[Client]


@dataclass
class Aim:
    """Whom the next strike hits, and the (log, seq) in flight there."""

    target: str
    places: set[Place] = field(default_factory=set[Place])


class Fault:
    """`aim` until it finds work in flight, `strike`, `hold`, `heal`; `effect` says what proves it, '' when nothing does."""

    blames: str | None = None  # the worker whose worker_failed this explains; '' any; None no one's

    def __init__(self, scene: Scene, dice: random.Random) -> None:
        self.world, self.watcher, self.clients = scene.world, scene.watcher, scene.clients
        self.dice = dice

    async def aim(self) -> Aim | None:
        raise NotImplementedError

    async def strike(self) -> None:
        raise NotImplementedError

    async def hold(self) -> None:
        return None

    async def heal(self) -> None:
        return None

    def effect(self) -> str:
        raise NotImplementedError

    # ---- who is there

    async def _all_in_flight(self) -> set[Place]:
        held = await in_flight(self.world.reader)
        places = set[Place]().union(*held.values()) if held else set[Place]()
        return places if len(places) >= MIN_OF_ALL else set()

    def _leader(self) -> Daemon | None:
        """The coordinator that holds the lease and serves."""
        latest = self.watcher.latest
        daemon = self.world.coordinator_at(latest.address) if latest else None
        if daemon is None or daemon.down or daemon.stopped or not daemon.alive() or latest is None:
            return None
        serves = any(e["event"] == "coordinator_ready" and e["epoch"] == latest.epoch for e in daemon.read_log())
        return daemon if serves else None

    def _standby(self) -> Daemon | None:
        """The other one, once it stands by."""
        leader = self._leader()
        for daemon in self.world.coordinators:
            if (
                daemon is not leader
                and leader is not None
                and daemon.alive()
                and not daemon.down
                and not daemon.stopped
            ):
                standing = [e["event"] for e in daemon.read_log() if e["event"].startswith("coordinator_")]
                if standing and standing[-1] == "coordinator_standby":
                    return daemon
        return None

    async def _a_worker(self) -> tuple[Daemon, set[Place]] | None:
        held = await in_flight(self.world.reader)
        candidates: list[tuple[Daemon, set[Place]]] = []
        for daemon in self.world.workers:
            ids = daemon.incarnations()
            places = held.get(ids[-1], set[Place]()) if ids else set[Place]()
            if len(places) >= MIN_OF_ONE and daemon.alive() and not daemon.down and not daemon.stopped:
                candidates.append((daemon, places))
        return self.dice.choice(candidates) if candidates else None
