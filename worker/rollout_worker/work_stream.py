"""Work stream, reopened forever, on whichever coordinator leads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import structlog
from rollout.config.pace import Pace
from rollout.model.errors import ProtocolError, RolloutError, UnavailableError
from rollout.wire.epoch import EpochGuard
from rollout.wire.frames import frames_of, joined
from rollout.wire.v1 import work_pb2, work_pb2_grpc

from rollout_worker import session_events as ev
from rollout_worker.link import EOF, Link, told_to_stop, typed

log = structlog.get_logger()

WELCOME_S = 5.0
REFUSALS_MAX = 3
FINISH_POLL_S = 0.02
TELL_AT = 5  # tries; a pause is 2 s at most
_LOST = "coordinator"
_NOBODY = "check [transport] coordinator_addrs and that a coordinator runs there; trying on"
_WRONG_CA = (
    "check [transport] coordinator_addrs; to enter the cluster that answers there, join it with a new token and "
    "another [transport] tls_dir; trying on"
)
UNSENT_MAX = 64 << 20
"""Bytes of relayed frames that may wait; above it the stream counts as stuck and is abandoned."""
_FATAL = frozenset({"not_allowed"})


class RefusedError(RolloutError):
    """The coordinators refuse this incarnation."""

    code = "refused"


class WorkStream:
    """Work stream. `event` is called with what happens; `send` sends a frame on the present stream, in order."""

    def __init__(
        self, link: Link, guard: EpochGuard, event: Callable[[ev.Event], None], new_session: Callable[[], str]
    ) -> None:
        self._link = link
        self._guard = guard
        self._event = event
        self._new_session = new_session
        self._session = ""
        self._frames: deque[work_pb2.WorkUp] = deque()
        self._relayed: deque[work_pb2.WorkUp] = deque()  # behind the frames
        self._relayed_bytes = 0
        self._ready = asyncio.Event()
        self._call: Any = None
        self._dropped = False
        self._welcomed = False
        self._refusals = 0
        self._tries = 0
        self._pace = Pace(lambda: asyncio.get_running_loop().time())
        self._closing = False

    def send(self, frame: work_pb2.WorkUp) -> None:
        if self._session:
            frame.session = self._session
            self._frames.append(frame)
            self._ready.set()

    def relay(self, frame: work_pb2.WorkUp) -> None:
        """Send a frame after everything that `send` sends."""
        if self._session:
            frame.session = self._session
            self._relayed.append(frame)
            self._relayed_bytes += len(frame.said.data)
            self._ready.set()
            if self._relayed_bytes > UNSENT_MAX:
                log.warning("relay_unsent", bytes=self._relayed_bytes, action="the stream is opened anew")
                self.drop()

    def drop(self, *, renewed: bool = False) -> None:
        """End the present stream and open another: at once on the same coordinator if `renewed`, else where
        possible."""
        self._dropped = renewed
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Keep a stream open. Raises RefusedError when every coordinator refuses this incarnation."""
        while True:
            try:
                await self._one()
                error: RolloutError = UnavailableError("the stream ended")
            except (grpc.aio.AioRpcError, grpc.aio.UsageError) as failed:
                error = typed(failed)
            except RolloutError as failed:
                error = failed
            renewed, self._dropped = self._dropped, False
            if self._welcomed:
                self._refusals = 0
            elif isinstance(error, ProtocolError) or error.code in _FATAL:
                self._refusals += 1
                if self._refusals >= REFUSALS_MAX:
                    raise RefusedError(error.message, by=error.code)
            if not renewed:
                self._tell(error)
                await self._link.failed(error)

    def _tell(self, error: RolloutError) -> None:
        """Log that the coordinator is lost, and repeat it at growing intervals."""
        self._tries = 0 if self._welcomed else self._tries + 1
        told = self._pace.tell(_LOST)
        if told is not None:
            lost_s, times = told
            lasting = {"lost_s": round(lost_s, 1), "times": times} if times > 1 else {}
            address = self._link.address
            log.info("coordinator_lost", addr=address, error=error.message, code=error.code, **lasting)
        # Not at once: a coordinator may be on its way back. Then whenever the loss is told of again.
        if self._tries == TELL_AT or (told is not None and self._tries > TELL_AT):
            log.warning(
                "no_coordinator",
                addrs=self._link.addresses,
                tries=self._tries,
                error=error.message,
                action=_WRONG_CA if "CERTIFICATE" in error.message.upper() else _NOBODY,
            )

    def _found(self) -> None:
        lost_s = self._pace.end(_LOST)
        if lost_s is not None:
            log.info("coordinator_found", addr=self._link.address, lost_s=round(lost_s, 1))

    async def _one(self) -> None:
        self._session = self._new_session()
        self._frames.clear()
        self._relayed.clear()
        self._relayed_bytes = 0
        self._welcomed = False
        stub: Any = work_pb2_grpc.WorkStub(self._link.channel)
        call = self._call = stub.Stream()
        patience = asyncio.get_running_loop().call_later(WELCOME_S, call.cancel)
        writer: asyncio.Task[None] | None = None
        try:
            self._event(ev.StreamUp(self._session))
            writer = asyncio.get_running_loop().create_task(self._write(call))
            await self._read(call, patience)
        except asyncio.CancelledError:
            if told_to_stop():
                raise
            raise UnavailableError("the stream was given up") from None
        finally:
            patience.cancel()
            call.cancel()
            self._call = None
            self._session = ""
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])
            self._event(ev.StreamDown())

    async def _read(self, call: Any, patience: asyncio.TimerHandle) -> None:
        while (message := await call.read()) is not EOF:
            for frame in frames_of(message):
                self._guard.check_peer(frame)
                if not self._welcomed and frame.WhichOneof("body") == "welcome":
                    self._welcomed = True
                    self._found()
                    patience.cancel()
                    self._link.succeeded()
                self._event(ev.Frame(frame))
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise typed(
                grpc.aio.AioRpcError(
                    code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                )
            )

    async def _write(self, call: Any) -> None:
        try:
            while True:
                while self._frames or self._relayed:  # also what came while the last message was written
                    for message in joined(self._queued()):
                        await call.write(message)
                self._ready.clear()
                if self._closing:
                    await call.done_writing()
                    return
                await self._ready.wait()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            log.debug("work_write_failed", error=str(error))
            call.cancel() if not call.done() else None

    def _queued(self) -> Iterator[work_pb2.WorkUp]:
        while self._frames or self._relayed:
            if self._frames:
                frame = self._frames.popleft()
            else:
                frame = self._relayed.popleft()
                self._relayed_bytes -= len(frame.said.data)
            frame.epoch = self._guard.current
            yield frame

    async def finish(self, timeout_s: float) -> None:
        """Send what is queued, half-close, and wait for the other side to end the stream, if need be the next one."""
        self._closing = True
        self._ready.set()
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while (left := until - loop.time()) > 0:
            if self._call is not None:
                waiting = asyncio.ensure_future(self._call.code())
                await asyncio.wait([waiting], timeout=left)
                if waiting.done() and not waiting.cancelled() and waiting.result() is grpc.StatusCode.OK:
                    return  # everything that was queued has been read
                waiting.cancel()
            await asyncio.sleep(FINISH_POLL_S)
