"""Each check of the driver and the router by itself, where the other tests do not depend on it alone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from rollout.model.errors import ConflictError, StorageUnavailableError, UnavailableError
from rollout_coordinator.core.events import Event, Loaded, Now, RunCommand
from rollout_coordinator.core.step import LoadPending, Step, Writes
from rollout_coordinator.driver import LeaseLostError
from rollout_coordinator.ledger.port import Fence
from rollout_coordinator.sessions import OUTBOX_MAX, Outbox, Router, Session
from rollout_coordinator.watchers import Watchers
from test_coordinator_driver import Bench, ScriptedCore, command


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_lease_that_ran_out_while_the_core_worked_commits_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await bench.start()
    handle = ScriptedCore.handle

    def slow(core: ScriptedCore, events: list[Event], now: Now) -> Step:
        bench.lease.good = not any(isinstance(event, RunCommand) for event in events)
        return handle(core, events, now)

    monkeypatch.setattr(ScriptedCore, "handle", slow)
    await bench.driver.request(command())
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(task, 60)
    assert not bench.ledger.commits and not bench.sent


async def test_a_commit_extends_the_lease_from_its_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    extended: list[float] = []
    began: list[float] = []
    monkeypatch.setattr(bench.lease, "extend", extended.append)
    commit = bench.ledger.commit

    async def slow(fence: Fence, writes: Writes) -> None:
        began.append(time.monotonic())
        await asyncio.sleep(0.05)
        await commit(fence, writes)

    monkeypatch.setattr(bench.ledger, "commit", slow)
    task = await bench.start()
    await (await bench.driver.request(command()))
    assert extended and extended[0] <= began[0]
    bench.driver.stop()
    await task


async def test_what_was_read_for_a_discarded_core_does_not_reach_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, gate = asyncio.Event(), asyncio.Event()

    async def slow(load: LoadPending) -> Loaded:
        reading.set()
        await gate.wait()
        return Loaded(load.load_id, load.log, [], 0, True)

    monkeypatch.setattr(bench.ledger, "pending", slow)
    task = await bench.start()
    await (await bench.driver.request(command("load")))
    await reading.wait()
    bench.ledger.fail = iter([StorageUnavailableError("gone")])
    with pytest.raises(UnavailableError):
        await (await bench.driver.request(command()))
    await bench.serving.wait()
    gate.set()
    await (await bench.driver.request(command()))
    assert len(bench.cores) == 2 and not bench.cores[1].seen(Loaded)
    bench.driver.stop()
    await task


async def test_a_query_waits_for_the_commit_under_way(bench: Bench) -> None:
    task = await bench.start()
    bench.ledger.gate.clear()
    future = await bench.driver.request(command())
    await bench.cores[0].saw(RunCommand)
    query = asyncio.ensure_future(bench.driver.query(lambda core, now: len(bench.ledger.commits)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not query.done()
    bench.ledger.gate.set()
    await future
    assert await query == 1
    bench.driver.stop()
    await task


def test_two_streams_under_one_name_are_refused() -> None:
    router = Router(Watchers())
    router.register(Session("S", "W"))
    with pytest.raises(ConflictError):
        router.register(Session("S", "W"))
    assert router.open_sessions == 1


def test_a_stream_that_nobody_reads_is_closed() -> None:
    outbox = Outbox()
    one: Any = object()
    for _ in range(OUTBOX_MAX + 1):
        outbox.put(one)
    assert isinstance(outbox.closed, UnavailableError)
