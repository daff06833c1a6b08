"""Heartbeats: one per interval on a stream, or by single calls while there is no stream. They never wait for work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc.aio
import structlog
from rollout.model.errors import RolloutError
from rollout.wire.epoch import EpochGuard
from rollout.wire.v1 import heartbeat_pb2, heartbeat_pb2_grpc

from rollout_worker.link import EOF, Link, told_to_stop, typed

log = structlog.get_logger()


class Heartbeat:
    """Sender of heartbeats: `beat()` makes the next message; `acknowledged(sent_at, known)` is called for what was
    read.

    Streams are acknowledged every second or two. After `ask_after_s` without an answer a single call asks for one, so
    that neither a shorter self-fence time nor a stuck stream fences a healthy worker.
    """

    def __init__(
        self,
        link: Link,
        guard: EpochGuard,
        interval_s: float,
        beat: Callable[[], heartbeat_pb2.BeatUp],
        acknowledged: Callable[[float, bool], None],
        clock: Callable[[], float],
        *,
        ask_after_s: float,
    ) -> None:
        self._link = link
        self._guard = guard
        self._interval_s = interval_s
        self._beat = beat
        self._acknowledged = acknowledged
        self._clock = clock
        self._number = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=4096)
        self._call: Any = None
        self._channel: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._ask_after_s = ask_after_s
        self._answered_at = clock()
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._one()
            due = max(due + self._interval_s, loop.time())
            await asyncio.sleep(due - loop.time())

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        for task in (self._reader, self._asking):
            if task is not None:
                task.cancel()
        self._call = self._reader = self._asking = None

    async def once(self) -> None:
        """Send one heartbeat by itself, the last message of a worker that leaves."""
        stub: Any = heartbeat_pb2_grpc.HeartbeatStub(self._link.channel)
        ack = await stub.Beat(self._next(), timeout=max(1.0, self._interval_s))
        self._read(ack)

    async def _one(self) -> None:
        if self._call is not None and (self._channel is not self._link.channel or self._call.done()):
            self.close()
        try:
            if self._call is None:
                await self.once()
                self._open()
            else:
                self._ask()
                await self._call.write(self._next())
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self.close()
            if not isinstance(error, asyncio.InvalidStateError):
                log.debug("beat_failed", error=typed(error).message)
        except asyncio.CancelledError:
            if told_to_stop():
                raise
            self.close()
        except RolloutError as error:
            self.close()
            log.debug("beat_refused", error=error.message)

    def _ask(self) -> None:
        late = self._clock() - self._answered_at >= self._ask_after_s
        if late and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._question())

    async def _question(self) -> None:
        try:
            await self.once()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, RolloutError) as error:
            log.debug("beat_failed", error=str(error))

    def _open(self) -> None:
        self._channel = self._link.channel
        stub: Any = heartbeat_pb2_grpc.HeartbeatStub(self._channel)
        self._call = stub.Beats()
        self._reader = asyncio.get_running_loop().create_task(self._acks(self._call))

    async def _acks(self, call: Any) -> None:
        try:
            while (ack := await call.read()) is not EOF:
                self._read(ack)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, RolloutError) as error:
            log.debug("beats_ended", error=str(error))
        call.cancel()

    def _next(self) -> heartbeat_pb2.BeatUp:
        self._number += 1
        message = self._beat()
        message.number = self._number
        message.epoch = self._guard.current
        self._sent.append((self._number, self._clock()))
        return message

    def _read(self, ack: heartbeat_pb2.BeatAck) -> None:
        self._guard.check_peer(ack)
        self._link.learn(tuple(ack.coordinators))
        sent_at: float | None = None
        while self._sent and self._sent[0][0] <= ack.number:
            sent_at = self._sent.popleft()[1]
        if sent_at is not None:
            self._answered_at = self._clock()
            self._acknowledged(sent_at, ack.known)
