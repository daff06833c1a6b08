"""A connection to the current leader: finds it, follows it, and renews its own certificate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog

from rollout.model.errors import AuthError, FencedError, RolloutError, UnavailableError
from rollout.security.credentials import Credentials
from rollout.wire.answers import REFUSED_S, WRONG_PEER_S, Answers, is_wrong_peer, no_answer
from rollout.wire.channel import open_channel
from rollout.wire.epoch import EpochGuard, StaleEpochError
from rollout.wire.errors import error_of
from rollout.wire.silence import telling
from rollout.wire.v1 import history_pb2_grpc as history_rpc
from rollout.wire.v1 import runs_pb2_grpc as rpc

log = structlog.get_logger()
EOF: Any = vars(grpc.aio)["EOF"]  # the type stubs lack it
"""The value that `read` of a stream returns at its end."""
Reply = TypeVar("Reply")

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 2.0
_LONG_S = 60.0  # who waits longer means to outlive a coordinator that is being repaired
_RENEW_AGAIN_S = 5.0
RETIRE_GRACE_S = 5.0


class Patience:
    """How long failures are tolerated, counted from the first one since the last success."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._since: float | None = None
        self._pause = _BACKOFF_FIRST_S

    def succeeded(self) -> None:
        if self._since is not None:
            self._connection.tell(None, asyncio.get_running_loop().time() - self._since)
        self._since = None
        self._pause = _BACKOFF_FIRST_S
        self._connection.succeeded()

    async def failed(self, error: RolloutError) -> None:
        """Wait until the next try is due. Raises `error` if a retry cannot help, or if retries took long enough."""
        if not error.retryable:
            raise error
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if waited >= self._connection.patience_now_s:
            raise self._connection.gave_up(error, waited) from error
        if isinstance(error, _WrongPeerError) and waited >= WRONG_PEER_S:
            raise AuthError(error.message) from error
        self._connection.tell(error, waited)
        # Jitter, so that clients of a dead leader do not meet again at the next one.
        await asyncio.sleep(self._pause * self._connection.jitter(0.5, 1.0))
        self._pause = min(self._pause * 2, _BACKOFF_MAX_S)


class _WrongPeerError(UnavailableError):
    """The TLS handshake failed."""


class ReplacedError(UnavailableError):
    """This process closed the channel during the call, for a renewed certificate or another coordinator; call again."""


async def unless_replaced(waiting: Awaitable[Reply]) -> Reply:
    """Return the reply. grpc raises CancelledError if the channel is closed during a call; this task is not cancelled,
    so that becomes ReplacedError."""
    try:
        return await waiting
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ReplacedError from None
    except grpc.aio.UsageError as error:  # the same, a moment earlier
        raise ReplacedError(str(error)) from error


class Connection:
    """Calls go to one coordinator until it fails or says that it is not the leader, then to its hint or the next.

    After `patience_s` seconds of failures a call gives up. `on_trouble(error, seconds)` is called for each failure and,
    with None, for its end; `tries_s` in an error's context says how long it is tolerated. `on_answer()` is called for
    the first answer. `addresses` must not be empty; those that the cluster reports are added, and `on_addresses(told)`
    is called whenever its report changes.
    """

    def __init__(
        self,
        addresses: list[str],
        credentials: Credentials,
        *,
        patience_s: float = 60.0,
        on_trouble: Callable[[RolloutError | None, float], None] | None = None,
        on_addresses: Callable[[list[str]], None] | None = None,
        on_answer: Callable[[], None] | None = None,
        dial: Callable[[str, Credentials], Any] = open_channel,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.addresses = list(dict.fromkeys(addresses))
        self.credentials = credentials
        self.patience_s = patience_s
        self._guard = EpochGuard()
        self._on_trouble = on_trouble
        self._on_addresses = on_addresses
        self._on_answer = on_answer
        self._told: tuple[str, ...] = ()
        self._answers = Answers()
        self._answered = False
        self._dial = dial  # a simulation brings its own, and its own jitter
        self.jitter = jitter
        self._address = self.addresses[0]
        self._channel: grpc.aio.Channel | None = None
        self._old: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._renew_again_at = 0.0
        self.turn = 0
        """Incremented with each channel that is given up: a failure on an older channel needs no further change."""

    @property
    def address(self) -> str:
        """Address of the coordinator in use."""
        return self._address

    @property
    def guard(self) -> EpochGuard:
        """The guard of this process, also used for requests for objects."""
        return self._guard

    @property
    def epoch(self) -> int:
        """The highest epoch seen, for every message sent."""
        return self._guard.current

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        for task in list(self._old):
            task.cancel()
        await asyncio.gather(*self._old, return_exceptions=True)

    async def stub(self) -> Any:
        """Return a RunsStub of the channel to the leader as far as known, after renewing a due certificate."""
        async with self._opening:
            await self._renew()
            if self._channel is None:
                self._channel = self._dial(self._address, self.credentials)
            return rpc.RunsStub(self._channel)

    async def history_stub(self) -> Any:
        """Return a stub for the history, like `stub`."""
        await self.stub()
        return history_rpc.HistoryStub(self._channel)

    async def dial(self) -> grpc.aio.Channel:
        """Return a channel for the caller alone, for a stream that must survive a replacement of this one's. Like
        `stub`, it goes to the current leader with a certificate that is not due."""
        async with self._opening:
            await self._renew()
            return self._dial(self._address, self.credentials)

    async def renewed(self) -> int:
        """Renew the certificate if it is due, and return its generation."""
        async with self._opening:
            await self._renew()
        return self.credentials.generation

    async def _renew(self) -> None:
        now = time.time()
        if not self.credentials.renew_due(now) or now < self._renew_again_at:
            return
        try:
            await self.credentials.renew()
        except UnavailableError:
            if self.credentials.not_after <= now:
                raise
            self._renew_again_at = now + _RENEW_AGAIN_S  # there is half a lifetime left for it
        else:
            self._retire()

    async def unary(self, call: Callable[[Any], Awaitable[Reply]]) -> Reply:
        """Return `call`'s reply, from whichever coordinator leads, through failovers."""
        patience = Patience(self)
        turn = self.turn
        while True:
            try:
                with self.telling():
                    stub = await self.stub()
                    turn = self.turn
                    reply = await unless_replaced(call(stub))
                self.seen(reply, turn)
            except grpc.aio.AioRpcError as error:
                await patience.failed(self.moved_on(error, turn))
            except UnavailableError as error:
                await patience.failed(error)
            else:
                patience.succeeded()
                return reply

    def seen(self, message: Any, turn: int) -> None:
        """Note the message's epoch, and the coordinators that it reports. Raises StaleEpochError, an UnavailableError,
        for a message of a deposed leader."""
        try:
            self._guard.check_peer(message)
        except StaleEpochError:
            self.leave(turn)
            raise
        self._learn(tuple(getattr(message, "coordinators", ())))

    def _learn(self, told: tuple[str, ...]) -> None:
        if not told or told == self._told:
            return
        self._told = told
        # What a person named stays: it may be another way to a coordinator that calls itself something else.
        self.addresses += [address for address in told if address not in self.addresses]
        if self._on_addresses is not None:
            self._on_addresses(list(told))

    def succeeded(self) -> None:
        """Note that a call succeeded."""
        self._answers.clear()
        self._heard()

    def _heard(self) -> None:
        if not self._answered and self._on_answer is not None:
            self._on_answer()
        self._answered = True

    @property
    def patience_now_s(self) -> float:
        """How long failures are currently tolerated."""
        hopeless = not self._answered and self.patience_s <= _LONG_S and self._answers.refused(self.addresses)
        return min(self.patience_s, REFUSED_S) if hopeless else self.patience_s

    def telling(self, owed: Callable[[], bool] = lambda: True) -> AbstractContextManager[None]:
        """Report to `on_trouble` if a wait inside takes longer than two seconds while an answer was `owed`
        throughout."""
        return telling(self._say, self._address, owed)

    def moved_on(self, error: grpc.aio.AioRpcError, turn: int) -> RolloutError:
        """Return the typed error. If another coordinator may do better, the next call goes there."""
        typed = _typed(error)
        if typed.retryable:
            if turn == self.turn:
                self._answers.note(self._address, typed)
            # One that is another cluster's is told of: what is asked of it must not be answered by the joined cluster.
            stay = isinstance(typed, _WrongPeerError) and not self._answered
            self.leave(turn, hint=str(typed.context.get("leader") or ""), stay=stay)
        else:
            self._heard()
        return typed

    def leave(self, turn: int, hint: str = "", *, stay: bool = False) -> None:
        """Switch to `hint` or the next coordinator (`stay`: reconnect to the same), once for all calls that fail on the
        channel of `turn`.

        If each call moved on, two streams and two coordinators would return to the dead one for ever.
        """
        if turn != self.turn:
            return
        self._retire()
        if stay:
            return
        if hint and hint != self._address:
            self._address = hint
            return
        known = self.addresses
        at = known.index(self._address) if self._address in known else -1
        self._address = known[(at + 1) % len(known)]

    def tell(self, error: RolloutError | None, seconds: float) -> None:
        if error is not None:
            log.debug("coordinator_unreachable", address=self._address, seconds=round(seconds, 1), reason=str(error))
            error = UnavailableError(self._answers.text() or error.message, tries_s=self.patience_now_s)
        self._say(error, seconds)

    def _say(self, error: RolloutError | None, seconds: float) -> None:
        if self._on_trouble is not None:
            self._on_trouble(error, seconds)

    def gave_up(self, error: RolloutError, waited: float) -> RolloutError:
        return no_answer(self._answers, self.addresses, error, waited)

    def _retire(self) -> None:
        self.turn += 1
        channel, self._channel = self._channel, None
        if channel is not None:
            # Calls of others on it have a moment to end; those that are cancelled then begin anew.
            task = asyncio.get_running_loop().create_task(channel.close(grace=RETIRE_GRACE_S))
            self._old.add(task)
            task.add_done_callback(self._old.discard)


async def raise_status(call: Any) -> None:
    """Raise the error with which a stream ended, if any."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )


def _typed(error: grpc.aio.AioRpcError) -> RolloutError:
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and is_wrong_peer(details):
        return _WrongPeerError(
            "the TLS handshake failed: the coordinator belongs to another cluster than the certificates in --tls-dir, "
            f"or one of them has expired. Join again with a new token ({details.splitlines()[0][:300]})"
        )
    typed = error_of(error)
    # A coordinator that was just deposed: another one leads.
    return UnavailableError(typed.message) if isinstance(typed, FencedError) else typed
