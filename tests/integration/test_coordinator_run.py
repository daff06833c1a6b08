"""A coordinator in this process, fake workers and clients over real mTLS: submit, dispatch, result, watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from blake3 import blake3
from coordinator_peers import Answer, FakeClient, FakeWorker, Held, item, items, ulid
from coordinator_places import inprocess
from rollout.model.item import ItemSpec, ObjectSlice
from rollout.wire.v1 import common_pb2, runs_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")  # grpc.aio knows one event loop a process


async def test_submit_dispatch_result_watch(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        rows = items(1000)
        replies = await client.submit(run_id, [rows[i : i + 100] for i in range(0, 1000, 100)])
        assert replies[0].status.state == "running" and replies[0].objects_addr
        assert replies[-1].durable == 1000 and replies[-1].sealed
        log, status = await client.collect(run_id)
        assert [seq for seq, _ in log] == list(range(1000))
        assert [data for _, data in log] == [f"done row {n}".encode() for n in range(1000)]
        assert (status.state, status.cursor, status.done, status.units_out) == ("completed", 1000, 1000, 3000)
        await worker.until(lambda: worker.accepted == 1000)
        assert worker.contexts == {run_id: b'{"a":1}'} and not worker.failures
        assert len(set(worker.assigned)) == 1000
        assert (await client.get(run_id)).state == "completed"  # from the ledger: the core has dropped it
        await client.close()
        await worker.stop()


async def test_a_watcher_that_is_behind_gets_every_row_before_the_last_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_coordinator.runs_service.STATUS_INTERVAL_S", 0.0)
    monkeypatch.setattr("rollout_coordinator.runs_service.PAGE_ROWS", 7)
    async with inprocess(tmp_path) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, [items(300)])
        log, status = await client.collect(run_id)
        assert ([seq for seq, _ in log], status.cursor) == (list(range(300)), 300)
        again, _ = await client.collect(run_id)  # of a run that has ended: everything is there at once
        assert again == log
        await client.close()
        await worker.stop()


async def test_a_second_run_gets_its_own_context_and_failures_are_in_the_log(tmp_path: Path) -> None:
    def work(held: Held) -> Answer:
        if held.payload == b"row 7":
            return common_pb2.ErrorInfo(code="bad_row", message="no prompt", retryable=False)
        return b"ok"

    async with inprocess(tmp_path) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls", work=work).start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        for body in (b'{"n":1}', b'{"n":2}'):
            run_id = ulid()
            await client.submit(run_id, [items(20)], config=body)
            failed: dict[int, str] = {}
            async for frame in client.watch(run_id, payloads=True):
                for error in frame.batch.errors:
                    failed[frame.batch.seq[error.index]] = error.code
                if frame.batch.seq:
                    assert len(frame.batch.ids) == 32 * len(frame.batch.seq)
                    assert set(frame.batch.workers) == {worker.incarnation}
            assert failed == {7: "bad_row"}
            assert worker.contexts[run_id] == body
            assert (await client.get(run_id)).failed == 1
        listed = await client.stub.List(runs_pb2.ListRequest(epoch=0))
        assert [r.state for r in listed.runs] == ["completed", "completed"]
        await worker.stop()
        await client.close()


async def test_submitting_again_finds_the_run_and_another_config_is_refused(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, [items(30)], seal=False)
        replies = await client.submit(run_id, [items(50)])
        assert replies[0].durable == 30 and replies[-1].durable == 50
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit(run_id, [], config=b'{"a":2}', seal=False)
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit(run_id, [[item(b"another", 0)]], seal=False)
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        await client.close()


async def test_pause_resume_kill_delete(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        go = False
        worker = await FakeWorker([node.addr], tmp_path / "tls", work=lambda held: b"x" if go else None).start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, [items(200)])
        await worker.until(lambda: len(worker.held) > 0)
        await client.command(run_id, "pause")
        async with asyncio.timeout(10):
            async for frame in client.watch(run_id):
                if frame.status.state == "paused":
                    break
        assert (await client.get(run_id)).in_flight == 0
        go = True
        assert (await client.command(run_id, "resume")).state == "running"
        assert (await client.collect(run_id))[1].state == "completed"
        other = ulid()
        await client.submit(other, [items(5)], seal=False)
        assert (await client.command(other, "kill")).state == "killed"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.command(other, "jump")
        assert "Unknown verb" in (caught.value.details() or "")
        reply = await client.stub.Delete(runs_pb2.RunRequest(epoch=0, run_id=run_id))
        assert reply.items == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.get(run_id)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        await worker.stop()
        await client.close()


async def test_results_with_objects_are_accepted_only_when_the_object_is_there(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, parts):
        body = b"large " * 2000
        digest = blake3(body).digest()
        stored = asyncio.Event()

        async def chunks() -> AsyncIterator[bytes]:
            yield body

        worker = FakeWorker([node.addr], tmp_path / "tls", work=lambda held: ObjectSlice(digest, 0, len(body)))
        await worker.start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        spec = ItemSpec(max_attempts=50, retry_backoff_ms=50)
        await client.submit(run_id, [[item(b"row", 0, spec)]])
        await worker.until(lambda: len(worker.assigned) >= 2)  # the first result was a failure, retried
        await parts.store.put(digest, chunks(), len(body))
        stored.set()
        log, status = await client.collect(run_id)
        assert log == [(0, ObjectSlice(digest, 0, len(body)))] and status.retried >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit(ulid(), [[item(ObjectSlice(b"y" * 32, 0, 5), 0)]])
        assert "upload objects before" in (caught.value.details() or "")
        await worker.stop()
        await client.close()


async def test_bounds_of_submit(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit(ulid(), [[item(b"x" * 70_000, 0)]])
        assert "upload it as an object" in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit("not-a-ulid", [])
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        run_id = ulid()
        await client.submit(run_id, [[item(b"x" * 60_000, n) for n in range(16)]], seal=False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.submit(run_id, [[item(b"x" * 60_000, n) for n in range(40)]])
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.get(run_id)).submitted == 16
        await client.close()


async def test_large_payloads_are_cut_into_frames(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls", work=lambda held: held.payload).start()
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        rows = [item(bytes([n]) * 60_000, n) for n in range(100)]
        await client.submit(run_id, [rows[i : i + 10] for i in range(0, 100, 10)])
        log, _ = await client.collect(run_id)
        assert [data for _, data in log] == [row.payload for row in rows]
        assert not worker.failures
        await worker.stop()
        await client.close()


async def test_metrics_and_health(tmp_path: Path) -> None:
    async with inprocess(tmp_path, extra='[http]\nlisten_addr = "127.0.0.1:0"\n') as (node, _):
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        await client.submit(ulid(), [items(25)], seal=False)
        line = node.probes.addr
        assert await fetch(line, "/healthz") == (200, "ok\n")
        assert await fetch(line, "/readyz") == (200, "leader\n")
        status, page = await fetch(line, "/metrics")
        assert status == 200
        for expected in (
            'rollout_items{state="pending"} 25.0',
            "rollout_items_submitted_total 25.0",
            'rollout_runs{state="running"} 1.0',
            "rollout_leader 1.0",
            "rollout_commit_seconds_count",
        ):
            assert expected in page
        gauges = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert float(gauges["rollout_asyncio_tasks"]) >= 5
        assert float(gauges["rollout_certificate_not_after_seconds"]) > time.time()
        assert (await fetch(line, "/nothing"))[0] == 404
        await client.close()


async def fetch(addr: str, path: str) -> tuple[int, str]:
    host, _, port = addr.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body.decode()
