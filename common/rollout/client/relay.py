"""The stream of a gateway to the replicas of its run: requests to running attempts, and their answers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
import grpc.aio

from rollout.client.connection import EOF, Connection, raise_status, unless_replaced
from rollout.model.errors import AuthError, RolloutError, UnavailableError
from rollout.wire.frames import frames_of, joined
from rollout.wire.pieces import MESSAGE_MAX, Assembly, pieces
from rollout.wire.v1 import common_pb2, serve_pb2, serve_pb2_grpc

DATA_MAX = MESSAGE_MAX
"""Maximum bytes of a message to or from a replica."""
UNSENT_MAX = 16 << 20
_UNREAD_MAX = 64
_OPENED_S = 10.0
"""A coordinator that accepts the stream and stays silent for this long is given up."""
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.1, 2.0
_EXPIRES_S = 600.0
"""The stream is reopened this long before its certificate ends, or after nine tenths of what is left of it."""


class Replica(NamedTuple):
    """The attempt that answers: its item, and its number."""

    log: int
    seq: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Up:
    """The replica takes requests. Replicas with the same `engine` share one process of `worker`, an incarnation."""

    replica: Replica
    worker: str
    engine: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The replica takes no new requests and finishes those that it has. Down follows."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Down:
    """The replica is gone, and with it every unanswered request."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Said:
    """A whole message of a replica."""

    replica: Replica
    data: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The coordinator was lost, and every replica with it: each is Down. Up comes again for those that still exist once
    the stream is restored. If `error.retryable` is False, it will not be: the stream ends with this event."""

    error: RolloutError


Event = Up | Draining | Down | Said | Broken


class ReplicaStream:
    """`async with ReplicaStream(connection, run_id) as stream: async for event in stream: ...`

    It connects, and reconnects whenever it breaks, for ever, to whichever coordinator leads. `connection` finds the
    leader, and may serve other calls at the same time; the stream has a channel of its own.
    """

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection = connection
        self._run_id = run_id
        self._up: set[Replica] = set()
        self._assembly = Assembly[Replica]()
        self._events: asyncio.Queue[Event] = asyncio.Queue(_UNREAD_MAX)
        self._opened = False
        self._unsent: deque[serve_pb2.GatewayUp] = deque()
        self._unsent_bytes = 0
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Return at once, before the stream is connected."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events, to one reader at a time."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Broken) and not event.error.retryable:
                return

    def send(self, replica: Replica, data: bytes) -> bool:
        """Send without waiting. Returns False, and sends nothing, if the replica is not up or more than 16 MiB are
        queued.

        Raises InputError for more than DATA_MAX bytes.
        """
        cut = list(pieces(data))
        if replica not in self._up or self._unsent_bytes > UNSENT_MAX:
            return False
        for piece, more in cut:
            said = serve_pb2.ReplicaData(replica=common_pb2.ReplicaKey(**replica._asdict()), data=piece, more=more)
            self._unsent.append(serve_pb2.GatewayUp(data=said))
        self._unsent_bytes += len(data)
        self._ready.set()
        return True

    # ---- the stream

    async def _run(self) -> None:
        pause = _PAUSE_FIRST_S
        while True:
            turn = self._connection.turn
            self._opened = False
            try:
                await self._one()
                error: RolloutError = UnavailableError("the stream ended")
            except grpc.aio.AioRpcError as failed:
                error = self._connection.moved_on(failed, turn)
            except RolloutError as failed:
                error = failed
                if error.retryable and not self._opened:
                    self._connection.leave(turn)
            if self._opened:
                pause = _PAUSE_FIRST_S
                if isinstance(error, AuthError):  # its certificate ended; one that is shut out hears of it again
                    error = UnavailableError(error.message)
            await self._broken(error)
            if not error.retryable:
                return
            await asyncio.sleep(pause * self._connection.jitter(0.5, 1.0))
            pause = min(pause * 2, _PAUSE_MAX_S)

    async def _broken(self, error: RolloutError) -> None:
        self._up.clear()
        self._assembly.clear()
        self._unsent.clear()
        self._unsent_bytes = 0
        await self._events.put(Broken(error))

    async def _one(self) -> None:
        loop = asyncio.get_running_loop()
        channel = await self._connection.dial()
        stub: Any = serve_pb2_grpc.ServeStub(channel)
        call = stub.Stream()
        self._unsent.append(serve_pb2.GatewayUp(open=serve_pb2.OpenGateway(run_id=self._run_id)))
        self._ready.set()
        lasts_s = self._connection.credentials.not_after - time.time()
        timers = [
            loop.call_later(_OPENED_S, lambda: None if self._opened else call.cancel()),
            loop.call_later(max(lasts_s - _EXPIRES_S, 0.9 * lasts_s), call.cancel),
        ]
        writer = loop.create_task(self._write(call))
        try:
            while (message := await unless_replaced(call.read())) is not EOF:
                for frame in frames_of(message):
                    self._connection.guard.check_peer(frame)
                    await self._frame(frame)
            await raise_status(call)
        finally:
            for timer in timers:
                timer.cancel()
            call.cancel()
            writer.cancel()
            await asyncio.wait([writer])
            await channel.close()

    async def _frame(self, frame: serve_pb2.GatewayDown) -> None:
        """Pass on a frame, waiting for the reader: what it leaves unread stays with the coordinator, within limits."""
        kind = frame.WhichOneof("body")
        if kind == "opened":
            self._opened = True
            self._connection.succeeded()
        elif kind == "up":
            replica = _replica(frame.up.replica)
            self._up.add(replica)
            await self._events.put(Up(replica, frame.up.worker, frame.up.engine))
        elif kind == "down":
            replica = _replica(frame.down.replica)
            if not frame.down.draining:
                self._up.discard(replica)
                self._assembly.forget(replica)
            await self._events.put(Draining(replica) if frame.down.draining else Down(replica))
        elif kind == "data":
            replica = _replica(frame.data.replica)
            whole = self._assembly.add(replica, frame.data.data, frame.data.more)
            if whole is not None:
                await self._events.put(Said(replica, whole))

    async def _write(self, call: Any) -> None:
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):  # its reader hears why
            while True:
                while self._unsent:
                    for message in joined(self._queued()):
                        await call.write(message)
                self._ready.clear()
                await self._ready.wait()

    def _queued(self) -> Iterator[serve_pb2.GatewayUp]:
        while self._unsent:
            frame = self._unsent.popleft()
            self._unsent_bytes -= len(frame.data.data)
            frame.epoch = self._connection.epoch
            yield frame


def _replica(wire: common_pb2.ReplicaKey) -> Replica:
    return Replica(wire.log, wire.seq, wire.attempt)
