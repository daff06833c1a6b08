"""Peers that send what they must not: only they are hurt, and they are told why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from coordinator_peers import FakeClient, FakeWorker, credentials, items, ulid
from coordinator_places import inprocess
from rollout.security.roles import Role
from rollout.wire.channel import open_channel
from rollout.wire.v1 import common_pb2, heartbeat_pb2, heartbeat_pb2_grpc, runs_pb2, work_pb2, work_pb2_grpc
from rollout_coordinator.lifecycle import Coordinator

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORK = "/rollout.wire.v1.Work/Stream"


class Scene:
    """A coordinator with a healthy worker and an unfinished run beside the hostile peer."""

    def __init__(self, node: Any, directory: Path) -> None:
        self.addr: str = node.addr
        self.tls_dir = directory / "tls"
        self.node = node

    async def begin(self) -> None:
        self.go = False
        self.worker = FakeWorker([self.addr], self.tls_dir, work=lambda held: b"x" if self.go else None)
        await self.worker.start()
        self.client = await FakeClient.open([self.addr], self.tls_dir)
        self.run_id = ulid()
        await self.client.submit(self.run_id, [items(20)])
        await self.worker.until(lambda: len(self.worker.held) == 20)

    async def end(self) -> None:
        """The others noticed nothing: the healthy worker keeps its stream and finishes the run."""
        self.go = True
        await self.client.submit(self.run_id, [items(20)])
        await self.client.submit(another := ulid(), [items(1)])
        await self.client.collect(another)  # the coordinator is the next test's too
        log, status = await self.client.collect(self.run_id)
        assert len(log) == 20 and status.state == "completed"
        assert self.worker.welcomes == 1 and not self.worker.failures
        assert status.attempts == 20 and status.worker_lost == 0
        await self.worker.stop()
        await self.client.close()

    async def channel(self, role: Role, incarnation: str | None = None) -> grpc.aio.Channel:
        return open_channel(self.addr, await credentials(self.tls_dir, role, incarnation))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coordinator(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Coordinator, Path]]:
    directory = tmp_path_factory.mktemp("hostile")
    async with inprocess(directory) as (node, _):
        yield node, directory


@pytest_asyncio.fixture(loop_scope="module")
async def scene(coordinator: tuple[Coordinator, Path]) -> AsyncIterator[Scene]:
    scene = Scene(*coordinator)
    await scene.begin()
    yield scene
    await scene.end()


def hello(incarnation: str, session: str | None = None, epoch: int | None = 0) -> work_pb2.WorkUp:
    inventory = common_pb2.Inventory(capacity={"slots": 1.0}, executors=["other"])
    body = work_pb2.Hello(incarnation=incarnation, inventory=inventory)
    return work_pb2.WorkUp(epoch=epoch, session=session if session is not None else ulid(), hello=body)


def credit(session: str) -> work_pb2.WorkUp:
    return work_pb2.WorkUp(epoch=0, session=session, credit=work_pb2.Credit(items=1))


def carrying(message: work_pb2.WorkUp, **frame: Any) -> work_pb2.WorkUp:
    message.then.add(**frame)
    return message


async def stream(channel: grpc.aio.Channel, frames: list[Any], *, raw: bool = False) -> tuple[grpc.StatusCode, str]:
    """Send the frames on Work, read until the end; how it ended."""
    if raw:
        call: Any = channel.stream_stream(WORK)()
    else:
        call = work_pb2_grpc.WorkStub(channel).Stream()
    try:
        for frame in frames:
            await call.write(frame)
        while await call.read() is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    async with asyncio.timeout(10):
        code, details = await call.code(), await call.details()
    await channel.close()
    return code, details


async def test_an_operator_on_the_worker_channel(scene: Scene) -> None:
    me = ulid()
    code, details = await stream(await scene.channel(Role.OPERATOR, me), [hello(me)])
    assert code == grpc.StatusCode.PERMISSION_DENIED and "operator" in details


async def test_a_worker_that_claims_anothers_id(scene: Scene) -> None:
    code, details = await stream(await scene.channel(Role.WORKER), [hello(scene.worker.incarnation)])
    assert code == grpc.StatusCode.PERMISSION_DENIED and "claims" in details
    beats = heartbeat_pb2_grpc.HeartbeatStub(await scene.channel(Role.WORKER))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await beats.Beat(heartbeat_pb2.BeatUp(epoch=0, incarnation=scene.worker.incarnation))
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_worker_on_the_client_channel(scene: Scene) -> None:
    client = await FakeClient.open([scene.addr], scene.tls_dir, Role.WORKER)
    for call in (
        lambda: client.get(scene.run_id),
        lambda: client.submit(ulid(), []),
        lambda: client.command(scene.run_id, "kill"),
        lambda: client.collect(scene.run_id),
        lambda: client.stub.Workers(runs_pb2.WorkersRequest(epoch=0)),
        lambda: client.stub.Delete(runs_pb2.RunRequest(epoch=0, run_id=scene.run_id, force=True)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    await client.close()


async def test_another_cluster_is_not_let_in(scene: Scene, tmp_path: Path) -> None:
    from rollout.security.authority import Authority

    Authority.load_or_create(tmp_path / "other", "rollout")
    client = await FakeClient.open([scene.addr], tmp_path / "other")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get(scene.run_id)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    await client.close()


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        (lambda me, s: [work_pb2.WorkUp(epoch=0, session=s, credit=work_pb2.Credit(items=1))], "must be Hello"),
        (lambda me, s: [hello(me, s), hello(me, s)], "one Hello"),
        (lambda me, s: [hello(me, "")], "session"),
        (lambda me, s: [hello(me, s, epoch=None)], "no epoch"),
        (lambda me, s: [hello(me, s), work_pb2.WorkUp(epoch=0, session=ulid(), credit=work_pb2.Credit())], "session"),
        (lambda me, s: [hello(me, s), work_pb2.WorkUp(epoch=0, session=s)], "without a body"),
        (lambda me, s: [hello(me, s), work_pb2.WorkUp(session=s, credit=work_pb2.Credit())], "no epoch"),
        (lambda me, s: [carrying(hello(me, s), session=s, credit=work_pb2.Credit())], "no epoch"),
        (lambda me, s: [carrying(hello(me, s), epoch=0, session=ulid(), credit=work_pb2.Credit())], "on the stream of"),
        (lambda me, s: [carrying(hello(me, s), epoch=0, session=s, then=[hello(me, s)])], "carry frames itself"),
        (lambda me, s: [hello(me, s), carrying(credit(s), epoch=0, session=s)], "without a body"),
        (lambda me, s: [hello(me, s), carrying(credit(s), epoch=0, session=s, hello=work_pb2.Hello())], "one Hello"),
        (
            lambda me, s: [
                hello(me, s),
                work_pb2.WorkUp(
                    epoch=0,
                    session=s,
                    results=work_pb2.Results(groups=[work_pb2.ResultGroup(log=1, seq=[1, 2], attempt=[1])]),
                ),
            ],
            "attempt",
        ),
        (
            lambda me, s: [
                hello(me, s),
                work_pb2.WorkUp(
                    epoch=0,
                    session=s,
                    results=work_pb2.Results(
                        groups=[work_pb2.ResultGroup(log=1, seq=[1], attempt=[1], length=[5], data=b"123")]
                    ),
                ),
            ],
            "bytes",
        ),
    ],
)
async def test_frames_that_break_the_protocol(scene: Scene, frames: Any, says: str) -> None:
    me = ulid()
    code, details = await stream(await scene.channel(Role.WORKER, me), frames(me, ulid()))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and says in details


class NeverRead:
    """A call whose peer sends `frames` and does not take what is written to it; notes what is asked of grpc."""

    def __init__(self, pem: bytes, frames: list[Any]) -> None:
        self.pem, self.frames, self.asked = pem, frames, list[str]()
        self.writing = asyncio.Event()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self.pem]}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        if len(self.frames) == 1:
            await self.writing.wait()
        return self.frames.pop(0)

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.asked.append("headers")

    async def write(self, message: Any) -> None:
        self.asked.append("write")
        self.writing.set()
        await asyncio.Event().wait()

    async def abort(self, code: Any, details: str, metadata: Any) -> None:
        self.asked.append("status")
        raise grpc.aio.AbortError


async def test_a_status_follows_headers_that_no_cancelled_write_had_to_bring(tmp_path: Path) -> None:
    """Seen once in a hundred streams: grpc took the headers for unsent, refused the status, and the peer heard nothing."""
    async with inprocess(tmp_path) as (_, parts):
        me, session = ulid(), ulid()
        pem = (await credentials(tmp_path / "tls", Role.WORKER, me))._chain_pem
        call = NeverRead(pem, [hello(me, session), hello(me, session)])
        with pytest.raises(grpc.aio.AbortError):
            await parts.work.Stream(None, call)
        assert call.asked == ["headers", "write", "status"]


async def test_garbage_and_oversized_frames(scene: Scene) -> None:
    me = ulid()
    code, details = await stream(await scene.channel(Role.WORKER, me), [b"\xff\xff\xff garbage"], raw=True)
    assert code == grpc.StatusCode.INVALID_ARGUMENT, details
    first = hello(me).SerializeToString()
    code, _ = await stream(await scene.channel(Role.WORKER, me), [first, b"\x07" * 100], raw=True)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    code, details = await stream(await scene.channel(Role.WORKER, me), [first, b"x" * (2 << 20)], raw=True)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details


async def test_results_that_were_never_assigned_quarantine_the_worker(scene: Scene) -> None:
    me, session = ulid(), ulid()
    log = next(iter(scene.worker.held.values())).log
    group = work_pb2.ResultGroup(log=log, seq=[3], attempt=[9], length=[1], data=b"!", duration_ms=[1])
    frames = [hello(me, session), work_pb2.WorkUp(epoch=0, session=session, results=work_pb2.Results(groups=[group]))]
    code, details = await stream(await scene.channel(Role.WORKER, me), frames)
    assert code == grpc.StatusCode.INVALID_ARGUMENT, details
    reply = await scene.client.stub.Workers(runs_pb2.WorkersRequest(epoch=0, all=True))
    assert {w.incarnation: w.state for w in reply.workers}[me] == "quarantined"


async def test_no_beat_of_a_quarantined_worker_is_answered(scene: Scene) -> None:
    """An answer would move the fence of whoever it is that runs its exclusive items."""
    me, session = ulid(), ulid()
    beats: Any = heartbeat_pb2_grpc.HeartbeatStub(await scene.channel(Role.WORKER, me))
    beat = heartbeat_pb2.BeatUp(epoch=0, incarnation=me, number=1)
    assert (await beats.Beat(beat)).number == 1
    group = work_pb2.ResultGroup(log=99, seq=[0], attempt=[1], length=[1], data=b"!", duration_ms=[1])
    frames = [hello(me, session), work_pb2.WorkUp(epoch=0, session=session, results=work_pb2.Results(groups=[group]))]
    await stream(await scene.channel(Role.WORKER, me), frames)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await beats.Beat(beat)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "quarantined" in (caught.value.details() or "")
    call = beats.Beats()
    await call.write(beat)
    with pytest.raises(grpc.aio.AioRpcError):
        assert await call.read() is None
    code, _ = await stream(await scene.channel(Role.WORKER, me), [hello(me)])
    assert code == grpc.StatusCode.INVALID_ARGUMENT, "nor is it welcomed"


async def test_a_liar_about_the_epoch_is_refused_and_deposes_nobody(scene: Scene) -> None:
    client = await FakeClient.open([scene.addr], scene.tls_dir)
    client.epoch = 99
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get(scene.run_id)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    await client.close()
