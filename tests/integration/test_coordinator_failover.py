"""Coordinators that die, stand by, take over, lose their database or fill their disk: no item is lost or done twice."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from coordinator_peers import FakeClient, FakeWorker, items, ulid
from coordinator_places import config, free_addr, inprocess, spawn
from rollout.model.errors import StorageFullError, StorageUnavailableError
from rollout.wire.v1 import runs_pb2
from rollout_coordinator.lease import LeaseKeeper
from rollout_coordinator.ledger.sqlite import SqliteLedger

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = 1500


def batches(count: int = ROWS) -> list[Any]:
    rows = items(count)
    return [rows[i : i + 250] for i in range(0, count, 250)]


def no_file_lock(lease: LeaseKeeper, now: float | None = None) -> bool:
    """Trust as on a database that several coordinators share."""
    return lease.leading and time.monotonic() < lease._started + lease._ttl - lease._margin  # pyright: ignore[reportPrivateUsage]


def check(log: list[tuple[int, bytes]], status: Any, count: int = ROWS) -> None:
    assert [seq for seq, _ in log] == list(range(count))
    assert [data for _, data in log] == [f"done row {n}".encode() for n in range(count)]
    assert (status.state, status.done) == ("completed", count)


async def test_restart_mid_run_keeps_what_is_in_flight(tmp_path: Path) -> None:
    addr = free_addr()
    path = config(tmp_path, addr)
    node = await spawn(path)
    ready = await node.event("coordinator_ready")
    assert ready["addr"] == addr and ready["epoch"] == 0
    hold = True
    worker = FakeWorker(
        [addr], tmp_path / "tls", work=lambda h: None if hold and h.seq >= 500 else b"done " + h.payload
    )
    await worker.start()
    client = await FakeClient.open([addr], tmp_path / "tls")
    run_id = ulid()
    await client.patiently(lambda: client.submit(run_id, batches()))
    await worker.until(lambda: worker.accepted >= 500 and len(worker.held) == worker.credit)
    held = set(worker.held)
    await node.kill()
    node = await spawn(path)
    assert (await node.event("coordinator_ready"))["epoch"] == 1
    await worker.until(lambda: worker.welcomes >= 2)
    assert held <= set(worker.held)  # adopted, not run again
    hold = False
    await worker.poke()
    log, status = await client.collect(run_id, 60)
    check(log, status)
    assert len({key[:2] for key in worker.assigned}) == ROWS and status.worker_lost == 0
    assert await node.kill(signal.SIGTERM) == 0
    await worker.stop()
    await client.close()


async def test_two_coordinators_on_one_sqlite_file(tmp_path: Path) -> None:
    first_addr, second_addr = free_addr(), free_addr()
    (tmp_path / "two").mkdir()
    shared = f'[storage.embedded]\npath = "{tmp_path / "rollout.db"}"\n'
    first = await spawn(config(tmp_path, first_addr))
    await first.event("coordinator_ready")
    env = {"ROLLOUT_TRANSPORT__TLS_DIR": str(tmp_path / "tls"), "ROLLOUT_OBJECTS__PATH": str(tmp_path / "objects")}
    second = await spawn(config(tmp_path / "two", second_addr, storage=shared), env)
    assert (await second.event("coordinator_standby"))["leader"] == first_addr
    lost = FakeClient(
        [second_addr], (client := await FakeClient.open([first_addr, second_addr], tmp_path / "tls")).owned
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lost.get(ulid())
    metadata = dict(caught.value.trailing_metadata() or ())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert (metadata["rollout-code"], metadata["rollout-leader"]) == ("not_leader", first_addr)
    worker = await FakeWorker([first_addr, second_addr], tmp_path / "tls").start()
    run_id = ulid()
    following: asyncio.Task[Any] | None = None
    await client.submit(run_id, batches(), seal=False)
    following = asyncio.create_task(client.collect(run_id, 60))
    await worker.until(lambda: worker.accepted >= 500)
    await first.kill()
    assert (await second.event("coordinator_ready"))["epoch"] == 1
    sealing = await FakeClient.open([second_addr], tmp_path / "tls")
    await sealing.patiently(lambda: sealing.submit(run_id, batches()))
    log, status = await following
    check(log, status)
    assert await second.kill(signal.SIGINT) == 130
    for closing in (lost, client, sealing):
        await closing.close()
    await worker.stop()


async def test_a_clean_stop_hands_over_at_once(tmp_path: Path, postgres_url: str) -> None:
    """The same on Postgres: killed, the standby waits for the TTL; stopped, it does not."""
    addrs = [free_addr(), free_addr(), free_addr()]
    storage = f'[storage]\nbackend = "postgres"\n[storage.postgres]\nurl = "{postgres_url}"\n'
    nodes = []
    env = {"ROLLOUT_TRANSPORT__TLS_DIR": str(tmp_path / "tls")}
    for n, addr in enumerate(addrs):
        (tmp_path / str(n)).mkdir()
        nodes.append(await spawn(config(tmp_path / str(n), addr, storage=storage), env))
        await nodes[-1].event("coordinator_standby" if n else "coordinator_ready")
    worker = await FakeWorker(addrs, tmp_path / "tls").start()
    client = await FakeClient.open(addrs, tmp_path / "tls")
    run_id = ulid()
    await client.submit(run_id, batches(1000))
    following = asyncio.create_task(client.collect(run_id, 60))
    await worker.until(lambda: worker.accepted >= 200)
    loop = asyncio.get_running_loop()
    await nodes[0].kill()
    killed_at = loop.time()
    leader = await first_event(nodes[1:], "coordinator_ready")
    assert loop.time() - killed_at < 1.5 + 3.0
    log, status = await following
    check(log, status, 1000)
    assert status.worker_lost == 0
    stopped_at = loop.time()
    stopping = asyncio.create_task(leader.kill(signal.SIGTERM))
    last = next(n for n in nodes[1:] if n is not leader)
    await last.event("coordinator_ready")
    assert loop.time() - stopped_at < 2.0
    assert await stopping == 0
    assert (await client.patiently(lambda: client.get(run_id))).state == "completed"
    assert await last.kill(signal.SIGTERM) == 0
    await worker.stop()
    await client.close()


async def first_event(nodes: list[Any], name: str) -> Any:
    tasks = {asyncio.create_task(node.event(name)): node for node in nodes}
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return tasks[done.pop()]


async def test_a_deposed_leader_ends_hard(tmp_path: Path, postgres_url: str) -> None:
    """Stopped for longer than the TTL, it wakes up to another epoch: one event, exit 3, nothing written."""
    storage = f'[storage]\nbackend = "postgres"\n[storage.postgres]\nurl = "{postgres_url}"\n'
    env = {"ROLLOUT_TRANSPORT__TLS_DIR": str(tmp_path / "tls")}
    (tmp_path / "two").mkdir()
    first = await spawn(config(tmp_path, free_addr(), storage=storage), env)
    await first.event("coordinator_ready")
    second = await spawn(config(tmp_path / "two", free_addr(), storage=storage), env)
    await second.event("coordinator_standby")
    first.process.send_signal(signal.SIGSTOP)
    assert (await second.event("coordinator_ready"))["epoch"] == 1
    first.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(5):
        assert await first.process.wait() == 3
    assert first.reader is not None
    await first.reader
    assert sum(line.get("event") == "coordinator_fenced" for line in first.lines) == 1
    assert await second.kill(signal.SIGTERM) == 0


class Unreliable(SqliteLedger):
    """Fails on demand as a database does that is away or full."""

    error: Exception | None = None

    async def commit(self, fence: Any, writes: Any) -> None:
        if self.error is not None:
            raise self.error
        await super().commit(fence, writes)

    async def read_lease(self) -> Any:
        if isinstance(self.error, StorageUnavailableError):
            raise self.error
        return await super().read_lease()


async def test_a_database_that_goes_away_and_returns(tmp_path: Path) -> None:
    ledger = Unreliable(tmp_path / "rollout.db")
    async with inprocess(tmp_path, ledger=ledger) as (node, parts):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, batches(), seal=False)
        following = asyncio.create_task(client.collect(run_id, 60))
        await worker.until(lambda: worker.accepted >= 300)
        ledger.error = StorageUnavailableError("the database is away")
        await worker.until(lambda: bool(worker.failures))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.get(run_id)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        ledger.error = None
        again = await FakeClient.open([node.addr], tmp_path / "tls")
        await again.patiently(lambda: again.submit(run_id, batches()))
        log, status = await following
        check(log, status)
        assert parts.leadership.epoch == 0  # the same tenure
        await worker.stop()
        await client.close()
        await again.close()


class Silent(Unreliable):
    """Reads get no answer at all, as over a link that was cut."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.silent = False
        self.waiting = {"commit_log": asyncio.Event(), "run_view": asyncio.Event()}

    async def _answer(self, read: str) -> None:
        if self.silent:
            self.waiting[read].set()
            await asyncio.Event().wait()

    async def commit_log(self, *args: Any) -> Any:
        await self._answer("commit_log")
        return await super().commit_log(*args)

    async def run_view(self, run_id: str) -> Any:
        await self._answer("run_view")
        return await super().run_view(run_id)


async def test_calls_that_wait_for_a_silent_database_end_with_the_tenure(tmp_path: Path) -> None:
    """Their links to the coordinator are whole, so nothing else would send them to the next leader."""
    ledger = Silent(tmp_path / "rollout.db")
    async with inprocess(tmp_path, ledger=ledger) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, batches(), seal=False)

        async def watch() -> None:
            async for _ in client.watch(run_id):
                ledger.silent = True

        calls: list[asyncio.Task[Any]] = [asyncio.create_task(watch())]
        await ledger.waiting["commit_log"].wait()
        calls.append(asyncio.create_task(client.get(ulid())))
        await ledger.waiting["run_view"].wait()
        ledger.error = StorageUnavailableError("the database is away")
        with pytest.raises(grpc.aio.AioRpcError):
            await client.submit(ulid(), batches())  # a commit, by which the loss is noticed
        done, waiting = await asyncio.wait(calls, timeout=60)
        assert not waiting, "a call waits for a store that its coordinator has lost"
        for call in done:
            error = call.exception()
            assert isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAVAILABLE
        ledger.error, ledger.silent = None, False
        await client.patiently(lambda: client.submit(run_id, batches()))
        check(*await client.collect(run_id, 60))
        await worker.stop()
        await client.close()


class Unanswering(SqliteLedger):
    """While ``answers`` is clear, commits and reads of the lease hang, and renewals fail: a real store bounds those."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.answers = asyncio.Event()
        self.answers.set()

    async def commit(self, fence: Any, writes: Any) -> None:
        await self.answers.wait()
        await super().commit(fence, writes)

    async def renew_lease(self, holder: str, epoch: int) -> bool:
        if not self.answers.is_set():
            raise StorageUnavailableError("no answer")
        return await super().renew_lease(holder, epoch)

    async def read_lease(self) -> Any:
        await self.answers.wait()
        return await super().read_lease()


async def test_a_leader_whose_commit_is_never_answered_stops_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers and clients reach it, so they would wait for it while another leads."""
    monkeypatch.setattr(LeaseKeeper, "trusted", no_file_lock)
    ledger = Unanswering(tmp_path / "rollout.db")
    async with inprocess(tmp_path, ledger=ledger) as (node, parts):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, batches(500), seal=False)
        ledger.answers.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(20):
                await client.submit(run_id, batches(), seal=False)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(20):
            await worker.until(lambda: bool(worker.failures))
        ledger.answers.set()
        await client.patiently(lambda: client.submit(run_id, batches()))
        check(*await client.collect(run_id, 60))
        assert parts.leadership.epoch == 1
        await worker.stop()
        await client.close()


async def test_a_full_disk_stops_cleanly_and_loses_nothing(tmp_path: Path) -> None:
    ledger = Unreliable(tmp_path / "rollout.db")
    run_id = ulid()
    async with inprocess(tmp_path, ledger=ledger) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        await client.submit(run_id, batches(1000), seal=False)
        await worker.until(lambda: worker.accepted >= 200)
        ledger.error = StorageFullError("the disk is full")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit(run_id, batches())
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert node.ended is not None
        async with asyncio.timeout(10):
            assert await node.ended == 1
        accepted = worker.accepted
        await worker.stop()
        await client.close()
    async with inprocess(tmp_path) as (node, _):
        worker.addresses = [node.addr]
        await worker.start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        before = await client.get(run_id)
        assert before.done >= accepted and before.submitted == 1000
        await client.submit(run_id, batches())
        log, status = await client.collect(run_id, 60)
        check(log, status)
        await worker.stop()
        await client.close()


async def test_a_run_that_ended_before_a_restart_is_found_again(tmp_path: Path) -> None:
    run_id = ulid()
    async with inprocess(tmp_path) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        await client.submit(run_id, batches(500))
        assert (await client.collect(run_id))[1].state == "completed"
        await worker.stop()
        await client.close()
    async with inprocess(tmp_path) as (node, _):
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        replies = await client.submit(run_id, batches(500))
        assert replies[0].durable == 500 and replies[0].status.state == "completed"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit(run_id, [], seal=False, config=b'{"other":1}')
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        log, status = await client.collect(run_id)
        check(log, status, 500)
        reply = await client.stub.Delete(runs_pb2.RunRequest(epoch=1, run_id=run_id))
        assert reply.items == 500
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.get(run_id)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        await client.close()
