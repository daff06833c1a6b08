"""The cluster under test: its processes and its supervisor, which starts again what ends, as systemd would."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from cluster import Cluster, Node
from postgres import PostgresServer

from chaos.audit import statements
from chaos.bucket import BucketUnderTest
from chaos.ledger_reader import AwayError, PostgresReader, Reader, SqliteReader
from chaos.links import Front, opener

T = TypeVar("T")

TTL_S = 5.0
"""`coordinator_failure_timeout_ms`, which is left at its default, as everything is but addresses."""

FENCED = 3
FIRST_WORDS = ("worker_starting", "lease_acquired", "coordinator_standby")
AHEAD = 10
RESTART_S = 0.3
DATABASE_STARTS = 40
MARK = "ROLLOUT_CHAOS_MARK"
"""Environment variable that every process of a campaign inherits: what still has it afterwards is an orphan."""


@dataclass(eq=False)
class Daemon:
    """A coordinator or worker that is kept running; `down` and `stopped` while a fault holds it so."""

    node: Node
    role: str
    down: bool = False
    stopped: bool = False
    started_at: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _offset: int = 0

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def pid(self) -> int:
        return self.node.process.pid if self.node.process is not None else 0

    def alive(self) -> bool:
        return self.node.alive()

    def read_log(self) -> list[dict[str, Any]]:
        """Its events so far; only what is new is read."""
        with contextlib.suppress(FileNotFoundError), self.node.log.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
            whole = data.rfind(b"\n") + 1
            self._offset += whole
            for line in data[:whole].splitlines():
                if line.startswith(b"{"):
                    with contextlib.suppress(ValueError):
                        self.events.append(json.loads(line))
        return self.events

    def count(self, event: str) -> int:
        return sum(1 for entry in self.read_log() if entry["event"] == event)

    def incarnations(self) -> list[str]:
        """Of a worker, oldest first."""
        return [entry["worker"] for entry in self.read_log() if entry["event"] == "worker_starting"]

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []


class World:
    """`start`, then `coordinators`, `workers`, `reader`; `close` always."""

    def __init__(
        self, database: str, root: Path, *, workers: int, dice: random.Random, say: Callable[[str], None]
    ) -> None:
        self.database = database
        self.root = root
        self.mark = uuid.uuid4().hex
        self.server: PostgresServer | None = None
        self.bucket: BucketUnderTest | None = BucketUnderTest(dice) if database == "cloud" else None
        self.database_down = False
        self.coordinators: list[Daemon] = []
        self.workers: list[Daemon] = []
        self.clients: dict[str, int] = {}  # name to pid of those that run at present
        self.fronts: dict[str, Front] = {}  # by coordinator
        self.database_fronts: dict[str, Front] = {}
        self.ports: dict[int, list[tuple[float, str]]] = {}  # at PostgreSQL: local port to (since, coordinator)
        self.objections: list[str] = []
        self.exits: list[dict[str, Any]] = []
        self.behind = give_way()
        self._n_workers = workers
        self._dice = dice
        self._say = say
        self._reader: Reader | None = None
        self._cluster = Cluster(root / "nodes")
        self._keeper: asyncio.Task[None] | None = None
        self._operator: list[str] = []
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def reader(self) -> Reader:
        assert self._reader is not None, "start() first"
        return self._reader

    @property
    def operator(self) -> list[str]:
        """Options that make a `rollout` command reach this cluster."""
        return self._operator

    @property
    def daemons(self) -> list[Daemon]:
        return [*self.coordinators, *self.workers]

    def object_to(self, what: str) -> None:
        self.objections.append(what)
        self._say(f"{self.database}: OBJECTION: {what}")

    # ---- start

    async def start(self) -> None:
        if self.bucket is not None:
            await self.bucket.open()
        if self.database in ("postgres", "cloud"):
            await self._blocking(self._start_server)
            assert self.server is not None
            self._reader = PostgresReader(self.server.url)
        for _ in range(2 if self.server else 1):
            await self._add_coordinator()
        if self._reader is None:
            self._reader = SqliteReader(self.coordinators[0].node.directory / "data/rollout.db")
        await self.reader.execute(*statements(self.database))
        self._operator = await self._blocking(self._cluster.operator)
        for _ in range(self._n_workers):
            # Runs share an engine of one configuration; the second is for the one that replaces it.
            section = {"max_engines": 2, "slots": 4, "drain_budget_s": 2.0}
            node = await self._blocking(self._cluster.add_worker, start=False, worker=section)
            self.workers.append(self._started(node, "worker"))
        for worker in self.workers:
            await self._blocking(worker.node.wait_event, "worker_starting")
        self._keeper = asyncio.create_task(self._keep())

    async def _blocking(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """In a thread, which ends in its own time when this is cancelled: `close` waits for it."""
        running = asyncio.ensure_future(asyncio.to_thread(call, *args, **options))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.shield(running)

    def _start_server(self) -> None:
        # Not below root, whose parents `nobody` may not enter.
        self.server = PostgresServer(Path(tempfile.mkdtemp(prefix="rollout-chaos-pg-")))
        self.server.init()
        self.server.start()

    async def _add_coordinator(self) -> None:
        sections: dict[str, Any] = {}
        name = f"coordinator-{len(self.coordinators) + 1}"
        if self.server is not None:
            front = await Front(
                "database",
                ("127.0.0.1", self.server.port),
                lambda *_: name,
                self._dice,
                lambda peer, port: self.ports.setdefault(port, []).append((time.time(), peer)),
            ).open()
            self.database_fronts[name] = front
            url = f"postgresql://{self.server.user}@{front.address}/postgres"
            sections = {"storage": {"backend": "postgres"}, "storage.postgres": {"url": url}}
            sections |= self.bucket.sections() if self.bucket else {"objects": {"backend": "postgres"}}
        others = self._cluster.addresses or None
        node = await self._blocking(self._cluster.add_coordinator, others=others, start=False, **sections)
        host, _, port = self._cluster.addresses[-1].rpartition(":")
        front = await Front(name, (host, int(port)), self._opener, self._dice).open()
        self.fronts[name] = front
        self._cluster.addresses[-1] = front.address
        path = node.directory / "coordinator.toml"
        path.write_text(path.read_text().replace("[transport]", f'[transport]\nadvertise_addr = "{front.address}"', 1))
        self.coordinators.append(self._started(node, "coordinator"))
        ready = "coordinator_standby" if others else "coordinator_ready"
        await self._blocking(node.wait_event, ready)

    def _started(self, node: Node, role: str) -> Daemon:
        node.env[MARK] = self.mark
        node.command = [*self.behind, *node.command]
        return Daemon(node.start(), role, started_at=time.monotonic())

    def _opener(self, port: int, own: int) -> str:
        return opener(port, own, {d.name: d.pid for d in self.daemons if d.pid} | self.clients)

    # ---- who is who

    def writer_of(self, port: int, at: float) -> str:
        """The coordinator whose connection to PostgreSQL came from `port` at that time."""
        known = [name for since, name in self.ports.get(port, []) if since <= at + 1]
        return known[-1] if known else ""

    def coordinator_at(self, address: str) -> Daemon | None:
        return next((d for d in self.coordinators if self.fronts[d.name].address == address), None)

    def worker_of(self, incarnation: str) -> Daemon | None:
        return next((d for d in self.workers if incarnation in d.incarnations()), None)

    # ---- the supervisor

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for daemon in self.daemons:
                if not daemon.down and not daemon.alive():
                    self._ended_by_itself(daemon)
                    await asyncio.sleep(RESTART_S)
                    self.restart(daemon)

    def _ended_by_itself(self, daemon: Daemon) -> None:
        code = daemon.node.process.returncode if daemon.node.process is not None else None
        last = [e for e in daemon.read_log()[-20:] if e.get("level") in ("error", "critical")]
        self.exits.append({"name": daemon.name, "code": code, "at": time.time()})
        fenced = (
            daemon.role == "coordinator" and code == FENCED and bool(last) and last[-1]["event"] == "coordinator_fenced"
        )
        if not fenced:
            self.object_to(f"{daemon.name} ended by itself with {code}: {last[-1] if last else daemon.node.tail(3)}")

    def restart(self, daemon: Daemon) -> None:
        daemon.node.start()
        daemon.started_at = time.monotonic()
        daemon.down = daemon.stopped = False

    # ---- the database

    async def kill_database(self) -> list[int]:
        """SIGKILL to every process of the server; their pids."""
        assert self.server is not None and self.server.process is not None
        self.database_down = True
        root = psutil.Process(self.server.process.pid)
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(self.server.process.wait)
        await asyncio.to_thread(psutil.wait_procs, processes, 10)
        self.server.process = None
        return [p.pid for p in processes]

    async def start_database(self) -> None:
        """As an init system would, again and again: PostgreSQL refuses while something of the killed one lives on."""
        assert self.server is not None
        for left in reversed(range(DATABASE_STARTS)):
            try:
                await self._blocking(self.server.start)
            except RuntimeError:
                if not left:
                    raise
                self.server.process = None
                await asyncio.sleep(0.5)
            else:
                break
        self.database_down = False

    # ---- end

    async def stop(self) -> None:
        """Stops everything as an operator would; what does not end cleanly is an objection."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for daemon in self.daemons:
            daemon.read_log()
        for group in (self.workers, self.coordinators):
            for daemon in group:
                if daemon.alive():
                    daemon.node.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
            for daemon in group:
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(daemon.node.process.wait, 20)  # type: ignore[union-attr]
                code = daemon.node.process.poll() if daemon.node.process else None
                # One that was only just started again knows no signals yet.
                begun = sum(1 for e in daemon.read_log() if e["event"] in FIRST_WORDS) >= daemon.node.starts
                if code != 0 and (begun or code != -signal.SIGTERM):
                    self.object_to(f"{daemon.name} ended with {code} when told to stop: {daemon.node.tail(3)}")

    async def close(self) -> None:
        """Leaves nothing running, however it ended."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self._reader is not None:
            await self._reader.close()
        self._kill_marked()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._kill_marked()
        for daemon in self.daemons:
            if daemon.node.process is not None:
                daemon.node.process.wait()
        for front in [*self.fronts.values(), *self.database_fronts.values()]:
            await front.close()
        if self.bucket is not None:
            await self.bucket.close()
        if self.server is not None:
            with contextlib.suppress(AwayError, OSError):
                await asyncio.to_thread(self._end_server)

    def _kill_marked(self) -> None:
        for process in self.marked():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _end_server(self) -> None:
        assert self.server is not None
        if self.server.process is not None and self.server.process.poll() is None:
            self.server.stop()
        shutil.rmtree(self.server.directory, ignore_errors=True)

    def marked(self) -> list[psutil.Process]:
        """Daemons, their children and clients of this campaign that run."""
        return list(_with_mark(self.mark))

    async def orphans(self, patience_s: float = 10.0) -> list[str]:
        """What still runs after a stop."""
        for _ in range(int(patience_s / 0.2)):
            if not self.marked():
                break
            await asyncio.sleep(0.2)
        return [f"{p.pid} {' '.join(_command(p))}" for p in self.marked()]


@functools.cache
def give_way() -> list[str]:
    """Puts this process ahead of those it starts, where that is allowed; what their commands must begin with then.

    It is their network: a busy machine must not turn it into one that is slow by itself.
    """
    try:
        os.nice(-AHEAD)
    except PermissionError:
        return []
    return ["nice", "-n", str(AHEAD)]


def _with_mark(mark: str) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return ["(gone)"]
