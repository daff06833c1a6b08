"""A real coordinator and real workers as processes of one machine, for the tests of the worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import prefork
import psutil
from blake3 import blake3
from cluster import binary, free_port
from rollout.client import Runs
from rollout.model.item import DEFAULT_SPEC, ItemSpec, NewItem
from rollout.model.run import RunSpec
from rollout.wire.v1 import runs_pb2
from rollout.workloads.commit import CommitEntry
from ulid import ULID

PATIENCE_S = 60.0


class Daemon:
    """A daemon and its log."""

    def __init__(self, directory: Path, command: list[str], env: dict[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "log.jsonl"
        with self.log.open("ab") as out:
            self.process = prefork.Popen(command, cwd=directory, stdout=out, stderr=out, env=os.environ | env)

    def events(self, name: str) -> list[dict[str, Any]]:
        whole = self.log.read_text(errors="replace").split("\n")[:-1]
        lines = [line for line in whole if line.startswith("{")]
        return [e for line in lines if (e := json.loads(line)).get("event") == name]

    async def event(self, name: str, count: int = 1) -> dict[str, Any]:
        await until(lambda: len(self.events(name)) >= count or self.process.poll() is not None, f"{name} in {self.log}")
        found = self.events(name)
        assert len(found) >= count, self.log.read_text()[-3000:]
        return found[count - 1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def family(self) -> list[psutil.Process]:
        """Every process it has started, however deep."""
        return psutil.Process(self.process.pid).children(recursive=True)


async def until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what}"
        await asyncio.sleep(0.02)


class Nodes:
    def __init__(self, root: Path, **transport: Any) -> None:
        self.root = root
        self.address = f"127.0.0.1:{free_port()}"
        self.tls_dir = root / "tls"
        values = {"listen_addr": self.address, "coordinator_addrs": [self.address], "tls_dir": str(self.tls_dir)}
        self.env = {"ROLLOUT_LOGGING__FORMAT": "json", "ROLLOUT_LOGGING__LEVEL": "debug"} | {
            f"ROLLOUT_TRANSPORT__{k.upper()}": json.dumps(v) if not isinstance(v, str) else v
            for k, v in (values | transport).items()
        }
        self.daemons: list[Daemon] = []
        self.workers: list[Daemon] = []
        (root / "empty.toml").write_text("")

    def coordinator(self) -> Daemon:
        command = [binary("rollout-coordinator"), "run", "--config", str(self.root / "empty.toml")]
        daemon = Daemon(self.root / "coordinator", command, self.env)
        self.daemons.append(daemon)
        return daemon

    def worker(self, *args: str, **worker: Any) -> Daemon:
        env = self.env | {f"ROLLOUT_{k.upper()}": str(v) for k, v in worker.items()}
        daemon = Daemon(self.root / f"worker-{len(self.workers)}", [binary("rollout-worker"), "run", *args], env)
        self.daemons.append(daemon)
        self.workers.append(daemon)
        return daemon

    async def client(self) -> Runs:
        return await Runs.connect([self.address], tls_dir=self.tls_dir)

    def close(self) -> None:
        for daemon in reversed(self.daemons):
            if daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
                daemon.process.kill()
        for daemon in self.daemons:
            daemon.process.wait(timeout=60)


def script(payload: dict[str, Any] | bytes, spec: ItemSpec = DEFAULT_SPEC, salt: int = 0) -> NewItem:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return NewItem(blake3(b"\x01" + salt.to_bytes(8, "big") + body).digest(), body, spec)


async def submit(runs: Runs, items: Sequence[NewItem], config: dict[str, Any] | None = None, **spec: Any) -> str:
    run_id = str(ULID())
    run = RunSpec(run_id=run_id, workload="script", config=json.dumps(config or {}).encode(), **spec)
    await runs.submit(run, lambda seq: iter(items[seq:]))
    return run_id


async def collect(runs: Runs, run_id: str) -> tuple[list[CommitEntry], runs_pb2.RunStatus]:
    """The whole commit log and the final status."""
    entries: list[CommitEntry] = []
    status: runs_pb2.RunStatus | None = None
    async for page in runs.watch(run_id):
        entries += page.entries
        status = page.status or status
    assert status is not None
    return entries, status


async def started(runs: Runs, run_id: str, count: int) -> None:
    """Returns once `count` attempts of the run have started."""
    async with asyncio.timeout(PATIENCE_S):
        while (await runs.get(run_id)).running < count:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


async def run_all(runs: Runs, items: Sequence[NewItem], **options: Any) -> list[CommitEntry]:
    async with asyncio.timeout(PATIENCE_S):
        return (await collect(runs, await submit(runs, items, **options)))[0]


def leftovers(family: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


__all__ = ["Daemon", "Nodes", "collect", "leftovers", "run_all", "script", "started", "submit", "until"]
