"""The faults: whom each strikes, how, for how long, and what proves that it took effect."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from chaos.clients import Client
from chaos.ledger_reader import in_flight
from chaos.links import DOWN, UP, Link, Shape
from chaos.watcher import Watcher
from chaos.world import FENCED, TTL_S, Daemon, World

MIN_OF_ONE, MIN_OF_ALL = 8, 24
"""Attempts that must be in flight at one worker, or in all, for a fault to count."""

TAKEOVER_S = 30.0
FENCED_EXIT_S = 30.0
STOOD_DOWN = ("coordinator_fenced", "lease_lost", "coordinator_standby")
RESTART_S = (0.0, 1.0)

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


class Kill(Fault):
    """SIGKILL of a daemon, or of it with its children, as a lost machine would be; started again within a second."""

    daemon: Daemon
    victims: Sequence[psutil.Process] = ()
    code: int | None = None

    def choose_victims(self) -> None:
        """Before work in flight is looked for: finding children takes longer than a row."""
        self.tree = self.dice.random() < 0.5
        self.victims = self.daemon.tree() if self.tree else [psutil.Process(self.daemon.pid)]

    async def strike(self) -> None:
        self.daemon.down = True
        for process in self.victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert self.daemon.node.process is not None
        self.code = await asyncio.to_thread(self.daemon.node.process.wait)

    async def hold(self) -> None:
        await asyncio.sleep(self.dice.uniform(*RESTART_S))

    async def heal(self) -> None:
        self.world.restart(self.daemon)

    def effect(self) -> str:
        return f"SIGKILL{' with children' if self.tree else ''}" if self.code == -signal.SIGKILL else ""


class KillWorker(Kill):
    async def aim(self) -> Aim | None:
        found = await self._a_worker()
        if found is None:
            return None
        self.daemon, _ = found
        self.choose_victims()
        held = await in_flight(self.world.reader)
        places = held.get(self.daemon.incarnations()[-1], set[Place]())
        self.blames = self.daemon.name
        return Aim(self.daemon.name, places) if places else None


class KillLeader(Kill):
    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None or (len(self.world.coordinators) > 1 and self._standby() is None):
            return None
        self.daemon = leader
        self.choose_victims()
        places = await self._all_in_flight()
        return Aim(leader.name, places) if places else None


class KillStandby(Kill):
    async def aim(self) -> Aim | None:
        standby = self._standby()
        if standby is None:
            return None
        self.daemon = standby
        self.choose_victims()
        places = await self._all_in_flight()
        return Aim(standby.name, places) if places else None


class Stop(Fault):
    """SIGSTOP of a daemon and its children beyond the TTL, then SIGCONT."""

    daemon: Daemon
    longer_s = (0.5, 2.0)
    was_stopped = False

    async def strike(self) -> None:
        self.daemon.stopped = True
        self.processes = self.daemon.tree()
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    async def hold(self) -> None:
        await asyncio.sleep(TTL_S + self.dice.uniform(*self.longer_s))

    async def heal(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.was_stopped = self.processes[0].status() == psutil.STATUS_STOPPED
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.daemon.stopped = False

    def effect(self) -> str:
        return "stopped" if self.was_stopped else ""


class StopWorker(Stop):
    longer_s = (1.0, 2.5)

    async def aim(self) -> Aim | None:
        found = await self._a_worker()
        if found is None:
            return None
        self.daemon, places = found
        self.blames = self.daemon.name
        return Aim(self.daemon.name, places)


class StopCoordinator(Stop):
    """The only one there is: everybody waits for it."""

    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None:
            return None
        self.daemon = leader
        places = await self._all_in_flight()
        return Aim(leader.name, places) if places else None


class StopLeader(StopCoordinator):
    """Until the standby has taken over; the old leader must then fence itself."""

    took_over = fenced = False

    async def aim(self) -> Aim | None:
        return await super().aim() if self._standby() is not None else None

    async def strike(self) -> None:
        self.epoch = self.watcher.epoch
        await super().strike()

    async def hold(self) -> None:
        self.took_over = await self.watcher.until(lambda: self.watcher.epoch > self.epoch, TAKEOVER_S)
        await asyncio.sleep(self.dice.uniform(0, 1))

    async def heal(self) -> None:
        known, events = len(self.world.exits), len(self.daemon.read_log())
        await super().heal()
        if not self.took_over:
            self.world.object_to(f"nobody took over from {self.daemon.name} within {TAKEOVER_S:.0f} s")
            return

        def gone() -> bool:
            if any(e["name"] == self.daemon.name and e["code"] == FENCED for e in self.world.exits[known:]):
                return True
            # One that could not ask its database yet gives up by its own clock, and stands by.
            return any(e["event"] in STOOD_DOWN for e in self.daemon.read_log()[events:])

        self.fenced = await self.watcher.until(gone, FENCED_EXIT_S)
        if not self.fenced:
            self.world.object_to(f"{self.daemon.name} was deposed and did not step down within {FENCED_EXIT_S:.0f} s")

    def effect(self) -> str:
        return "deposed, stepped down" if self.was_stopped and self.took_over and self.fenced else ""


class Cut(Fault):
    """A black hole on some links, in both directions or one."""

    links: Sequence[Link]
    one_way = False
    up_to_s = TTL_S + 2.5

    async def strike(self) -> None:
        self.directions = (self.dice.choice((UP, DOWN)),) if self.one_way else (UP, DOWN)
        self.before = [(link.held_bytes, link.held_connections) for link in self.links]
        for link in self.links:
            link.cut(*self.directions)

    async def hold(self) -> None:
        self.held_s = self.dice.uniform(0.5, self.up_to_s)
        await asyncio.sleep(self.held_s)

    async def heal(self) -> None:
        for link in self.links:
            link.heal()

    def effect(self) -> str:
        held = sum(link.held_bytes - b for link, (b, _) in zip(self.links, self.before, strict=True))
        waiting = sum(link.held_connections - c for link, (_, c) in zip(self.links, self.before, strict=True))
        way = (
            "both ways"
            if len(self.directions) == 2
            else "to the server"
            if UP in self.directions
            else "from the server"
        )
        return f"{way}, {held} bytes and {waiting} new connections held" if held or waiting else ""


class CutWorker(Cut):
    """One worker from every coordinator."""

    async def aim(self) -> Aim | None:
        found = await self._a_worker()
        if found is None:
            return None
        daemon, places = found
        self.blames = daemon.name
        self.links = [front.link(daemon.name) for front in self.world.fronts.values()]
        return Aim(daemon.name, places)


class CutWorkerOneWay(CutWorker):
    one_way = True


class CutWorkerSomehow(CutWorker):
    async def aim(self) -> Aim | None:
        self.one_way = self.dice.random() < 0.5
        return await super().aim()


class CutCoordinator(Cut):
    """The coordinator from everybody, in both directions or one."""

    blames = ""

    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None:
            return None
        self.one_way = self.dice.random() < 0.5
        self.links = list(self.world.fronts[leader.name].links.values())
        places = await self._all_in_flight()
        return Aim(leader.name, places) if places else None


class CutDatabase(Cut):
    """The leader from its database, in both directions or one."""

    up_to_s = TTL_S + 3.0

    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None or self._standby() is None or self.world.database_down:
            return None
        self.one_way = self.dice.random() < 0.5
        self.links = list(self.world.database_fronts[leader.name].links.values())
        places = await self._all_in_flight()
        return Aim(f"{leader.name} - database", places) if places else None


class OnLinks(Fault):
    """Strikes every link of one worker, or of the leader."""

    async def _aim_at(self, *, leading: bool) -> Aim | None:
        if leading:
            leader, places = self._leader(), await self._all_in_flight()
            if leader is None or not places:
                return None
            self.links = list(self.world.fronts[leader.name].links.values())
            return Aim(leader.name, places)
        found = await self._a_worker()
        if found is None:
            return None
        daemon, places = found
        self.links = [front.link(daemon.name) for front in self.world.fronts.values()]
        return Aim(daemon.name, places)


class Slow(OnLinks):
    """Delay, little bandwidth and stalls."""

    async def aim(self) -> Aim | None:
        return await self._aim_at(leading=self.dice.random() < 0.3)

    async def strike(self) -> None:
        self.before = sum(link.slowed_bytes for link in self.links), sum(link.slowed_s for link in self.links)
        self.shape = Shape(
            delay_s=self.dice.uniform(0.05, 0.3),
            jitter_s=self.dice.uniform(0.0, 0.2),
            bytes_per_s=self.dice.choice((20_000, 100_000, 1_000_000)),
            stall_rate=self.dice.uniform(0.0, 0.1),
            stall_s=self.dice.uniform(0.2, 0.8),
        )
        for link in self.links:
            link.shape = self.shape

    async def hold(self) -> None:
        await asyncio.sleep(self.dice.uniform(2.0, 4.0))

    async def heal(self) -> None:
        for link in self.links:
            link.heal()

    def effect(self) -> str:
        size = sum(link.slowed_bytes for link in self.links) - self.before[0]
        waited = sum(link.slowed_s for link in self.links) - self.before[1]
        return f"{size} bytes delayed, {self.shape.delay_s * 1000:.0f} ms and more each" if size and waited else ""


class Reset(OnLinks):
    """RST on every connection of one worker, or of the leader; where there is none, it does not count."""

    count = 0

    async def aim(self) -> Aim | None:
        return await self._aim_at(leading=self.dice.choice(("worker", "worker", "leader")) == "leader")

    async def strike(self) -> None:
        self.count = sum(link.reset() for link in self.links)

    def effect(self) -> str:
        return f"{self.count} connections reset" if self.count else ""


class KillClient(Fault):
    """SIGKILL of `rollout infer batch` while its run is under way; the same command is typed again."""

    async def aim(self) -> Aim | None:
        latest = self.watcher.latest
        held = await in_flight(self.world.reader)
        candidates: list[tuple[Client, set[Place]]] = []
        for client in self.clients:
            run = client.batch.run_id if client.batch and client.process else ""
            log = latest.logs.get(run) if latest else None
            places = {(at, seq) for keys in held.values() for at, seq in keys if at == log}
            # One that has only just begun again is left to connect.
            if places and time.monotonic() - client.started_at > 1.0 and latest and latest.states.get(run) == "running":
                candidates.append((client, places))
        if not candidates:
            return None
        self.client, places = self.dice.choice(candidates)
        return Aim(self.client.name, places)

    async def strike(self) -> None:
        assert self.client.process is not None
        process = self.client.process
        self.starts = self.client.batch.starts if self.client.batch else 0
        self.client.kill()
        self.code = await process.wait()

    async def heal(self) -> None:
        batch = self.client.batch
        assert batch is not None
        if not await self.watcher.until(lambda: batch.starts > self.starts, 10.0):
            self.world.object_to(f"{self.client.name} was not started again")

    def effect(self) -> str:
        return "SIGKILL, started again" if self.code == -signal.SIGKILL else ""


class KillDatabase(Fault):
    """SIGKILL of every process of PostgreSQL; started again within two seconds."""

    async def aim(self) -> Aim | None:
        if self.world.database_down:
            return None
        places = await self._all_in_flight()
        return Aim("database", places) if places else None

    async def strike(self) -> None:
        self.pids = await self.world.kill_database()

    async def hold(self) -> None:
        await asyncio.sleep(self.dice.uniform(0.0, 2.0))

    async def heal(self) -> None:
        self.gone = not any(psutil.pid_exists(pid) for pid in self.pids[:1])
        await self.world.start_database()

    def effect(self) -> str:
        return f"SIGKILL of {len(self.pids)} processes" if self.gone else ""


KINDS: dict[str, dict[str, type[Fault]]] = {
    "sqlite": {
        "coordinator killed": KillLeader,
        "coordinator stopped": StopCoordinator,
        "coordinator cut off": CutCoordinator,
        "worker killed": KillWorker,
        "worker stopped": StopWorker,
        "worker cut off": CutWorker,
        "worker cut off one way": CutWorkerOneWay,
        "slow links": Slow,
        "connections reset": Reset,
        "client killed": KillClient,
    },
    "postgres": {
        "leader killed": KillLeader,
        "leader stopped": StopLeader,
        "standby killed": KillStandby,
        "database killed": KillDatabase,
        "leader cut from database": CutDatabase,
        "leader cut off": CutCoordinator,
        "worker killed": KillWorker,
        "worker stopped": StopWorker,
        "worker cut off": CutWorkerSomehow,
        "slow links": Slow,
        "client killed": KillClient,
    },
}
