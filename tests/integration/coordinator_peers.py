"""A worker and a client that speak the real protocol over mTLS and do nothing but that."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from blake3 import blake3
from rollout.model.ids import make_ulid
from rollout.model.item import ItemSpec, NewItem, ObjectSlice
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire.channel import open_channel
from rollout.wire.codec import item_batch_to_wire, unpack_blobs
from rollout.wire.frames import frames_of
from rollout.wire.v1 import common_pb2, heartbeat_pb2, heartbeat_pb2_grpc, runs_pb2, runs_pb2_grpc, work_pb2
from rollout.wire.v1 import work_pb2_grpc as work_grpc

CLUSTER = "rollout"


def ulid() -> str:
    return make_ulid(time.time_ns() // 1_000_000, secrets.token_bytes(10))


async def credentials(tls_dir: Path, role: Role, incarnation: str | None = None) -> Credentials:
    return await Credentials.obtain(
        tls_dir=tls_dir,
        cluster=CLUSTER,
        role=role,
        incarnation=incarnation or ulid(),
        lifetime_s=3600.0,
        addresses=[],
    )


def item(payload: bytes | ObjectSlice, n: int, spec: ItemSpec | None = None) -> NewItem:
    digest = blake3(f"{n}".encode() + (payload if isinstance(payload, bytes) else payload.object_id)).digest()
    return NewItem(digest, payload, spec) if spec else NewItem(digest, payload)


def items(count: int, start: int = 0) -> list[NewItem]:
    return [item(f"row {n}".encode(), n) for n in range(start, start + count)]


Answer = bytes | ObjectSlice | common_pb2.ErrorInfo | None
"""What a fake worker makes of a payload; None: keep it unfinished."""


@dataclass
class Held:
    log: int
    seq: int
    attempt: int
    payload: Any
    run_id: str


@dataclass
class FakeWorker:
    """Dials a coordinator, answers every assignment with `work(payload)`, keeps results until they are acknowledged."""

    addresses: list[str]
    tls_dir: Path
    credit: int = 64
    work: Callable[[Held], Answer] = lambda held: b"done " + held.payload
    incarnation: str = field(default_factory=ulid)
    epoch: int = 0
    held: dict[tuple[int, int, int], Held] = field(default_factory=dict)
    results: dict[tuple[int, int, int], Answer] = field(default_factory=dict)
    assigned: list[tuple[int, int, int]] = field(default_factory=list)
    contexts: dict[str, bytes] = field(default_factory=dict)
    accepted: int = 0
    stale: int = 0
    welcomes: int = 0
    failures: list[grpc.aio.AioRpcError] = field(default_factory=list)
    beats: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    send: Any = None  # of the open session
    channel: grpc.aio.Channel | None = None
    _task: asyncio.Task[None] | None = None

    async def start(self) -> FakeWorker:
        self._task = asyncio.create_task(self._live())
        return self

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def poke(self) -> None:
        """Ask `work` again about what is held."""
        if self.send is not None:
            await self._finish(self.send)

    async def until(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        async with asyncio.timeout(timeout):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def _live(self) -> None:
        owned = await credentials(self.tls_dir, Role.WORKER, self.incarnation)
        turn = 0
        while True:
            channel = open_channel(self.addresses[turn % len(self.addresses)], owned)
            try:
                await self._session(channel)
            except grpc.aio.AioRpcError as error:
                self.failures.append(error)
                self.changed.set()
            except asyncio.InvalidStateError:
                self.changed.set()  # a write to a call that has just ended; reading would have told with what
            finally:
                await channel.close()
            turn += 1
            await asyncio.sleep(0.05)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        call = work_grpc.WorkStub(channel).Stream()
        self.channel = channel
        session = ulid()

        async def send(**body: Any) -> None:
            await call.write(work_pb2.WorkUp(epoch=self.epoch, session=session, **body))

        beating = asyncio.create_task(self._beat(channel))
        try:
            await send(hello=self._hello())
            self.send = send
            while isinstance(message := await call.read(), work_pb2.WorkDown):
                for frame in frames_of(message):
                    self.epoch = max(self.epoch, frame.epoch)
                    await self._receive(frame, send)
                self.changed.set()
            raise grpc.aio.AioRpcError(await call.code(), await call.initial_metadata(), await call.trailing_metadata())
        finally:
            self.send = None
            beating.cancel()
            call.cancel()
            await asyncio.gather(beating, return_exceptions=True)  # `suppress` would swallow a `stop` at this point

    def _hello(self) -> work_pb2.Hello:
        return work_pb2.Hello(
            incarnation=self.incarnation,
            inventory=common_pb2.Inventory(capacity={"slots": float(self.credit)}, executors=["test"], host="fake"),
            credit=work_pb2.Credit(items=self.credit, bytes=4 << 20),
            held=_keys(self.held),
            held_started=_keys(self.held),
            unacknowledged=_keys(self.results),
        )

    async def _beat(self, channel: grpc.aio.Channel) -> None:
        call = heartbeat_pb2_grpc.HeartbeatStub(channel).Beats()
        number = 0
        while True:
            if self.beats:
                number += 1
                await call.write(
                    heartbeat_pb2.BeatUp(epoch=self.epoch, incarnation=self.incarnation, number=number, state=2)  # type: ignore[arg-type]
                )
            await asyncio.sleep(0.1)

    async def _receive(self, frame: work_pb2.WorkDown, send: Any) -> None:
        kind = frame.WhichOneof("body")
        if kind == "welcome":
            self.welcomes += 1
            for key in _each(frame.welcome.drop):
                self.held.pop(key, None)
                self.results.pop(key, None)
            for key in _each(frame.welcome.accepted):
                self.results.pop(key, None)
            await self._submit(list(_each(frame.welcome.resend)), send)
            await self._finish(send)
        elif kind == "assign":
            for group in frame.assign.groups:
                if group.run.config:
                    self.contexts[group.run.run_id] = group.run.config
                blobs = unpack_blobs(group.length, group.data, group.refs)
                for seq, attempt, payload in zip(group.seq, group.attempt, blobs, strict=True):
                    key = (group.log, seq, attempt)
                    self.assigned.append(key)
                    self.held[key] = Held(*key, payload, group.run.run_id)
            await send(started=work_pb2.Started(keys=_keys(self.held)))
            await self._finish(send)
        elif kind == "accepted":
            for key in _each(frame.accepted.accepted):
                if self.results.pop(key, None) is not None:
                    self.accepted += 1
            for key in _each(frame.accepted.stale):
                self.results.pop(key, None)
                self.stale += 1
        elif kind == "revoke":
            await send(confirm=work_pb2.Confirm(revoke_id=frame.revoke.revoke_id, kept=frame.revoke.keys))
        elif kind in ("cancel", "pause"):
            keys = list(_each(frame.cancel.keys)) if kind == "cancel" else list(self.held)
            for key in keys:
                self.held.pop(key, None)
            if kind == "pause" and keys:
                await send(released=work_pb2.Released(keys=_keys(keys), reason="pause"))

    async def _finish(self, send: Any) -> None:
        done: list[tuple[int, int, int]] = []
        for key, held in list(self.held.items()):
            answer = self.work(held)
            if answer is not None:
                del self.held[key]
                self.results[key] = answer
                done.append(key)
        await self._submit(done, send)

    async def _submit(self, keys: list[tuple[int, int, int]], send: Any) -> None:
        groups: dict[int, work_pb2.ResultGroup] = {}
        for key in keys:
            answer = self.results.get(key)
            group = groups.setdefault(key[0], work_pb2.ResultGroup(log=key[0]))
            index = len(group.seq)
            group.seq.append(key[1])
            group.attempt.append(key[2])
            group.duration_ms.append(1)
            group.units_out.append(3)
            failed = isinstance(answer, common_pb2.ErrorInfo)
            group.outcome.append(2 if failed else 1)  # type: ignore[arg-type]
            group.length.append(len(answer) if isinstance(answer, bytes) else 0)
            if isinstance(answer, bytes):
                group.data += answer
            elif isinstance(answer, ObjectSlice):
                ref = common_pb2.ObjectRef(object_id=answer.object_id, offset=answer.offset, length=answer.length)
                group.refs.add(index=index, ref=ref)
            elif answer is not None:
                error = group.errors.add()
                error.CopyFrom(answer)
                error.index = index
        if groups:
            await send(results=work_pb2.Results(groups=list(groups.values())))


def _keys(keys: Iterable[tuple[int, int, int]]) -> list[common_pb2.AttemptKeys]:
    return [common_pb2.AttemptKeys(log=log, seq=[seq], attempt=[attempt]) for log, seq, attempt in keys]


def _each(groups: Iterable[common_pb2.AttemptKeys]) -> Iterable[tuple[int, int, int]]:
    for keys in groups:
        for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
            yield keys.log, seq, attempt


class FakeClient:
    """Calls Runs; `patiently` repeats what a coordinator that is not serving refuses, at the next address."""

    def __init__(self, addresses: list[str], owned: Credentials) -> None:
        self.addresses = addresses
        self.owned = owned
        self._channels = [open_channel(a, owned) for a in addresses]
        self._turn = 0
        self.epoch = 0

    @classmethod
    async def open(cls, addresses: list[str], tls_dir: Path, role: Role = Role.OPERATOR) -> FakeClient:
        return cls(addresses, await credentials(tls_dir, role))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    @property
    def stub(self) -> Any:
        return runs_pb2_grpc.RunsStub(self._channels[self._turn % len(self._channels)])

    async def patiently(self, call: Callable[[], Any], timeout: float = 30.0) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                # A write into a stream that the server has just ended makes grpc.aio report INTERNAL, not its status.
                ended = error.code() == grpc.StatusCode.INTERNAL and "from Core" in (error.details() or "")
                if (error.code() != grpc.StatusCode.UNAVAILABLE and not ended) or time.monotonic() > deadline:
                    raise
                self._turn += 1
                await asyncio.sleep(0.05)

    def open_frame(self, run_id: str, **fields: Any) -> runs_pb2.SubmitUp:
        spec = {"workload": "test", "config": b'{"a":1}', "order": "schedule", "pause_timeout_ms": 2000} | fields
        return runs_pb2.SubmitUp(epoch=self.epoch, open=runs_pb2.RunSpec(run_id=run_id, **spec))

    async def submit(
        self, run_id: str, batches: list[list[NewItem]], *, seal: bool = True, **fields: Any
    ) -> list[runs_pb2.SubmitDown]:
        """Everything on one stream; the replies in order."""
        call = self.stub.Submit()
        replies: list[runs_pb2.SubmitDown] = []
        with contextlib.suppress(asyncio.InvalidStateError):  # the call ended: reading tells with what
            await call.write(self.open_frame(run_id, **fields))
            if isinstance(opened := await call.read(), runs_pb2.SubmitDown):
                replies.append(opened)
            seq = 0
            for batch in batches:
                await call.write(runs_pb2.SubmitUp(epoch=self.epoch, items=item_batch_to_wire(seq, batch)))
                seq += len(batch)
            if seal:
                await call.write(runs_pb2.SubmitUp(epoch=self.epoch, seal=runs_pb2.Seal(count=seq)))
            await call.done_writing()
        while isinstance(reply := await call.read(), runs_pb2.SubmitDown):
            self.epoch = max(self.epoch, reply.epoch)
            replies.append(reply)
        if await call.code() != grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        return replies

    async def watch(self, run_id: str, cursor: int = 0, payloads: bool = False) -> AsyncIterator[runs_pb2.WatchDown]:
        request = runs_pb2.WatchRequest(epoch=self.epoch, run_id=run_id, cursor=cursor, payloads=payloads)
        async for frame in self.stub.Watch(request):
            self.epoch = max(self.epoch, frame.epoch)
            yield frame

    async def collect(self, run_id: str, timeout: float = 30.0) -> tuple[list[tuple[int, bytes]], runs_pb2.RunStatus]:
        """The whole commit log, through restarts of the coordinator, and the final status."""
        rows: list[tuple[int, bytes]] = []
        final = runs_pb2.RunStatus()

        async def follow() -> None:
            async for frame in self.watch(run_id, len(rows), payloads=True):
                batch = frame.batch
                blobs = unpack_blobs(batch.length, batch.data, batch.refs)
                rows.extend(zip(batch.seq, blobs, strict=True))  # type: ignore[arg-type]
                if frame.HasField("status"):
                    final.CopyFrom(frame.status)

        async with asyncio.timeout(timeout):
            await self.patiently(follow, timeout)
        return rows, final

    async def get(self, run_id: str) -> runs_pb2.RunStatus:
        reply = await self.stub.Get(runs_pb2.RunRequest(epoch=self.epoch, run_id=run_id))
        return reply.status

    async def command(self, run_id: str, verb: str) -> runs_pb2.RunStatus:
        reply = await self.stub.Command(runs_pb2.CommandRequest(epoch=self.epoch, run_id=run_id, verb=verb))
        return reply.status
