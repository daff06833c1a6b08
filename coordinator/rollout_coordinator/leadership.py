"""The current role of this coordinator, and the gate for every call: leader, epoch, identity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import wraps
from typing import Any, NoReturn, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from rollout.model.errors import AuthError, NotLeaderError, ProtocolError, RolloutError, UnavailableError
from rollout.security.roles import Enrolment, Peer, Role, require
from rollout.wire.epoch import Stamped
from rollout.wire.errors import abort

from rollout_coordinator.clock import Clock
from rollout_coordinator.http.metrics import Metrics

EOF: Any = cast(Any, grpc.aio).EOF  # what reading a stream past its end gives


EXAMINED = "/rollout.wire.v1.Doctor/"
"""Calls that a coordinator answers even while it does not serve."""


class Part(StrEnum):
    STANDBY = "standby"
    REPLAYING = "replaying"  # holds the lease, reads the ledger
    LEADER = "leader"
    STOPPED = "stopped"


class Leadership:
    """There is one instance per process. `changed` callbacks run on every change of role."""

    def __init__(self) -> None:
        self.part = Part.STANDBY
        self.epoch = 0
        self.leader_address = ""  # of another coordinator, as last read from the lease
        self.trouble = ""  # why the database cannot be used at present
        self.suspect: Callable[[int], None] = lambda epoch: None

    @property
    def leading(self) -> bool:
        return self.part is Part.LEADER

    def refusal(self) -> RolloutError | None:
        """Return why calls are refused now, or None while serving."""
        if self.part is Part.LEADER:
            return None
        if self.trouble and self.part is not Part.STOPPED:
            return UnavailableError(
                f"The coordinator cannot use its database at present: {self.trouble}", leader=self.leader_address
            )
        if self.part is Part.REPLAYING:
            return UnavailableError("The coordinator is replaying its ledger; try again in a moment.")
        return NotLeaderError("This coordinator is not the leader.", leader=self.leader_address)


class Gate:
    """Checks every RPC, and is the only place where an error becomes a gRPC status."""

    def __init__(
        self, leadership: Leadership, metrics: Metrics, clock: Clock, is_revoked: Callable[[str], bool]
    ) -> None:
        self._leadership = leadership
        self._metrics = metrics
        self._clock = clock
        self._is_revoked = is_revoked
        self._waits: dict[asyncio.Timeout, None] = {}  # in the order they began, so that a simulation replays
        self._ended: RolloutError = NotLeaderError("This coordinator is not the leader.")
        self.identified: Callable[[Any], None] = lambda context: None  # this call's connection is no stranger's

    @property
    def epoch(self) -> int:
        return self._leadership.epoch

    def check(self, message: Stamped) -> None:
        """Raise ProtocolError without an epoch, NotLeaderError if the sender has seen a newer leader."""
        refusal = self._leadership.refusal()
        if refusal is not None:
            raise refusal
        if not message.HasField("epoch"):
            raise ProtocolError(f"{type(message).__name__} carries no epoch.")
        if message.epoch > self._leadership.epoch:
            self._leadership.suspect(message.epoch)
            raise NotLeaderError(
                f"The sender has seen epoch {message.epoch}, this coordinator is at {self._leadership.epoch}."
            )

    def peer(self, context: Any, *roles: Role, id: str | None = None) -> Peer:
        """Return the caller's identity. Raises AuthError for another role, another id or a revoked host."""
        peer = require(context, *roles, id=id)
        self.check_host(peer)
        self.identified(context)
        return peer

    def check_host(self, peer: Peer | Enrolment) -> None:
        """Raise AuthError if the host was revoked or the certificate expired; long-lived streams check it
        repeatedly."""
        if peer.not_after * 1000 < self._clock.now().wall_ms:
            raise AuthError("The certificate of this stream has expired; renew it and connect again.")
        if peer.host_id and self._is_revoked(peer.host_id):
            raise AuthError(f"Host {peer.host_id} was revoked; join it again with a new token.")

    @asynccontextmanager
    async def answering(self, context: Any) -> AsyncGenerator[None]:
        """End the call with the status of a RolloutError raised inside."""
        try:
            yield
        except DecodeError as error:
            await self._refuse(context, ProtocolError(f"Not a message of this protocol: {error}"))
        except RolloutError as error:
            await self._refuse(context, error)

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None]:
        """Raise inside the block, with the reason, as soon as this coordinator stops serving.

        A store that was cut off may never answer while the link to the caller works: the call would wait here, and the
        caller would ask no other coordinator. Do not use it around writes of a stream: a status that follows a
        cancelled write can get lost in grpc.aio.
        """
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits[wait] = None
                try:
                    yield
                finally:
                    self._waits.pop(wait, None)
        except TimeoutError:
            if wait.expired():
                raise self._ended from None
            raise

    def end_waits(self, error: RolloutError) -> None:
        """End everything inside `waiting` with `error`."""
        self._ended = error
        waits, self._waits = self._waits, {}
        for wait in waits:
            wait.reschedule(asyncio.get_running_loop().time())

    async def _refuse(self, context: Any, error: RolloutError) -> NoReturn:
        self._metrics.refused.labels(error.code).inc()
        await abort(context, error)


Method = Callable[..., Coroutine[Any, Any, Any]]


def unary(role: Role) -> Callable[[Method], Method]:
    """Decorate a method of a servicer with a `_gate`: only `role` may call it, a worker only for itself, while this
    coordinator leads. The answer carries the epoch; exceptions end the call with their status."""

    def decorate(work: Method) -> Method:
        @wraps(work)
        async def call(self: Any, request: Any, context: Any) -> Any:
            gate: Gate = self._gate
            async with gate.answering(context), gate.waiting():
                gate.check(request)
                peer = gate.peer(context, role, id=request.incarnation if role is Role.WORKER else None)
                answer = await work(self, request, peer)
                answer.epoch = gate.epoch
                return answer
            raise AssertionError

        return call

    return decorate


class StandbyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call at once, before a message is read, while this coordinator does not serve."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        refusal = self._leadership.refusal()
        if refusal is None or cast(Any, handler_call_details).method.startswith(EXAMINED):
            return await continuation(handler_call_details)

        async def refuse(request_iterator: Any, context: Any) -> None:
            await abort(context, refusal)

        return cast(Any, grpc).stream_stream_rpc_method_handler(refuse)


def address_of(peer: str) -> str:
    """Return the address in `ipv4:10.0.0.1:4711`, since the port changes with every connection, or ""."""
    kind, _, address = unquote(peer).partition(":")
    return address.rsplit(":", 1)[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


async def read(context: Any) -> Any | None:
    """Return the next frame of a stream, or None at its end. Raises ProtocolError for bytes that are not a message."""
    frame = await context.read()
    return None if frame is EOF else frame
