"""Real daemons, driven by the scripted executor: what the tests of the engine have in common."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import pytest
from blake3 import blake3
from cluster import Cluster, Node
from postgres import execute
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.model.run import ENDED, RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry

PATIENCE_S = 60.0

on_both_databases = pytest.mark.parametrize("rough_cluster", ["sqlite", "postgres"], indirect=True)
"""For what a ledger must give back. What a ledger must take is shown by its contract, on both, without processes."""


@contextmanager
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh Postgres database for a fixture that outlives a test; empty for SQLite."""
    if request.param == "sqlite":
        yield ""
        return
    server = request.getfixturevalue("postgres_server_url")
    name = f"engine_{uuid.uuid4().hex[:16]}"
    execute(server, f'CREATE DATABASE "{name}"')
    yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    execute(server, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


class EngineCluster(Cluster):
    """One host key for all workers of this machine: joining is tested elsewhere."""

    def _join(self, tls_dir: Path, role: str, program: str) -> None:
        first = self.root / f"tls-{role}"
        if not first.exists():
            super()._join(first, role, program)
        tls_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(first, tls_dir)

    def worker(
        self, node: str, slots: int = 2, *, args: list[str] | None = None, roles: Sequence[str] = (), **sections: Any
    ) -> Node:
        worker = {"slots": slots, "roles": list(roles), "drain_budget_s": 20.0}
        labels: dict[str, Any] = {"worker.labels": {"node": node}}
        return self.add_worker(args=args, worker=worker, **labels | sections)

    def ready(self) -> None:
        for node in self.workers:
            if node.alive():
                node.wait_event("worker_ready", count=node.starts)

    @property
    def coordinator(self) -> Node:
        return self.coordinators[0]

    def incarnation(self, node: Node) -> str:
        return list(node.events("worker_ready"))[-1]["incarnation"]


async def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """What `condition` returns once it is true."""
    deadline = asyncio.get_running_loop().time() + patience_s
    while not (found := condition()):
        assert asyncio.get_running_loop().time() < deadline, f"waited {patience_s:.0f} s for {what}"
        await asyncio.sleep(0.03)
    return found


@dataclass(frozen=True, slots=True)
class Effect:
    what: str  # start | end | cancelled
    name: str
    attempt: int
    at: int


def overlap(effects: Sequence[Effect]) -> int:
    """The most attempts that were under way at once."""
    most = now = 0
    for effect in sorted(effects, key=lambda e: (e.at, e.what == "start")):
        now += 1 if effect.what == "start" else -1
        most = max(most, now)
    return most


class Engine:
    """A client of the cluster, and files through which items are held, released and heard of."""

    def __init__(self, cluster: EngineCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self._count = itertools.count()
        self._client: Runs | None = None

    @property
    def client(self) -> Runs:
        assert self._client is not None
        return self._client

    async def __aenter__(self) -> Self:
        options = await asyncio.to_thread(self.cluster.operator)
        self._client = await Runs.connect(self.cluster.addresses, tls_dir=Path(options[-1]))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    # ---- items

    def item(self, payload: dict[str, Any] | bytes, **spec: Any) -> NewItem:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        number = next(self._count)
        spec.setdefault("retry_backoff_ms", 100)
        return NewItem(blake3(body + number.to_bytes(8, "big")).digest(), body, ItemSpec(**spec))

    def gate(self, name: str = "gate") -> Path:
        """Items with `until` = this go on once it is touched."""
        return self.directory / name

    @property
    def effects_file(self) -> str:
        return str(self.directory / "effects")

    def effects(self, what: str = "") -> list[Effect]:
        path = Path(self.effects_file)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = [Effect(w, name, int(n), int(at)) for w, name, n, at in map(str.split, lines)]
        return [e for e in found if not what or e.what == what]

    async def started(self, count: int) -> list[Effect]:
        return await until(
            lambda: found if len(found := self.effects("start")) >= count else None, f"{count} items to start"
        )

    # ---- runs

    async def submit(self, items: Sequence[NewItem], *, seal: bool = True, **spec: Any) -> str:
        run = RunSpec(new_ulid(), "script", b"{}", **spec)
        await self.client.submit(run, lambda seq: iter(items[seq:]), seal=seal)
        return run.run_id

    async def finish(self, run_id: str, payloads: bool = False) -> tuple[list[CommitEntry], pb.RunStatus]:
        """Its commit log and status when it has ended."""
        entries: list[CommitEntry] = []
        status: pb.RunStatus | None = None

        async def watch() -> None:
            nonlocal status
            async for page in self.client.watch(run_id, payloads=payloads):
                entries.extend(page.entries)
                status = page.status or status

        await asyncio.wait_for(watch(), PATIENCE_S)
        assert status is not None
        return entries, status

    async def run(self, items: Sequence[NewItem], **spec: Any) -> tuple[list[CommitEntry], pb.RunStatus]:
        return await self.finish(await self.submit(items, **spec))

    async def status(self, run_id: str, condition: Callable[[pb.RunStatus], bool], what: str) -> pb.RunStatus:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not condition(status := await self.client.get(run_id)):
            assert asyncio.get_running_loop().time() < deadline, f"waited for {what}; now {status}"
            await asyncio.sleep(0.05)
        return status

    async def clear(self) -> None:
        """End what still runs."""
        for run in await self.client.list():
            if run.state not in ENDED:
                await self.client.command(run.spec.run_id, "kill")

    @asynccontextmanager
    async def workers(self, *nodes: tuple[str, int], **sections: Any) -> AsyncIterator[list[Node]]:
        """Workers for one scenario, gone afterwards."""
        made = [self.cluster.worker(name, slots, **sections) for name, slots in nodes]
        try:
            for node in made:
                await asyncio.to_thread(node.wait_event, "worker_ready")
            yield made
        finally:
            for node in made:
                if node.alive():
                    node.kill()

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Once everything that started has ended or was cancelled."""
        await until(lambda: len(self.effects("start")) * 2 == len(self.effects()), "all that started to stop")
        yield

    async def restart_coordinator(self, step: str = "coordinator_ready") -> None:
        """Killed, started again, and come as far as that event."""
        node = self.cluster.coordinator
        count = 1 + sum(1 for _ in node.events(step))
        await asyncio.to_thread(node.kill)
        node.start()
        await asyncio.to_thread(node.wait_event, step, 60.0, count)


def done(entries: Sequence[CommitEntry]) -> list[str]:
    """Data of the entries, which must all be done."""
    bad = [(e.seq, e.outcome, e.failure) for e in entries if e.outcome is not Outcome.DONE]
    assert not bad, bad
    return [e.data.decode() for e in entries]


def outcomes(entries: Sequence[CommitEntry]) -> list[Outcome]:
    return [e.outcome for e in entries]
