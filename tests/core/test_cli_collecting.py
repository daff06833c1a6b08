"""Collecting a batch: what a Ctrl-C in the middle leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rollout.cli import collecting
from rollout.cli.collecting import WorkloadRun
from rollout.cli.progress import Snapshot
from rollout.client import Page
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.infer.workload import Infer
from rollout.workloads.port import Checked


def run_of(runs: Any, collector: Any, display: Any) -> WorkloadRun:
    return WorkloadRun(Infer(), runs, "R", {}, cast(Any, Checked(config={}, total=1)), collector, display)


class Slow:
    """A collector that is in the middle of writing until it is let go; two writers at once are an error."""

    cursor = 0

    def __init__(self) -> None:
        self.began, self.go, self.one = threading.Event(), threading.Event(), threading.Lock()
        self.done: list[str] = []

    def add(self, entries: list[Any]) -> None:
        assert self.one.acquire(blocking=False)
        self.began.set()
        self.go.wait(20)
        self.done.append("add")
        self.one.release()

    def flush(self) -> None:
        assert self.one.acquire(blocking=False)
        self.done.append("flush")
        self.one.release()

    def close(self) -> None:
        self.done.append("close")


class OnePage:
    """A run with one page, whose submission never ends."""

    async def watch(self, *_: Any, **__: Any) -> AsyncGenerator[Page]:
        yield Page([cast(Any, object())])
        await asyncio.Event().wait()

    async def submit(self, *_: Any, **__: Any) -> int:
        await asyncio.Event().wait()
        return 0


async def test_a_batch_that_is_stopped_while_it_writes_closes_its_files_afterwards() -> None:
    slow = Slow()
    run = run_of(OnePage(), slow, SimpleNamespace())
    job = asyncio.ensure_future(run.carry_out(Path(), None, detach=False))
    await asyncio.to_thread(slow.began.wait, 20)
    for _ in range(2):  # a second cancellation does not cut it short either
        job.cancel()
        await asyncio.sleep(0.05)
        assert not job.done()
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await job
    run.close()
    assert slow.done == ["add", "flush", "close"]


class Idle:
    """A run that has a worker, then none for long, then one again and none."""

    async def watch(self, *_: Any, **__: Any) -> AsyncGenerator[Page]:
        for running in (1, 0, 0, 1, 0):
            yield Page([], status=pb.RunStatus(state="running", running=running))
        yield Page([], status=pb.RunStatus(state="completed"))

    async def submit(self, *_: Any, **__: Any) -> int:
        return 0


async def test_a_run_that_nobody_works_at_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "IDLE_S", 0.0)
    said: list[str] = []

    def progress(snapshot: Snapshot) -> None:
        said.append(f"{snapshot.running} running")

    display = SimpleNamespace(note=said.append, progress=progress)
    collector = SimpleNamespace(cursor=0, flush=lambda: None, finish=lambda *_, **__: {})
    run = run_of(Idle(), collector, display)
    assert (await run._collect())[0].state == "completed"  # pyright: ignore[reportPrivateUsage]
    told = ["note" if "`rollout workers`" in line else line[0] for line in said]
    assert told == ["1", "0", "note", "0", "1", "0", "note", "0"], said
